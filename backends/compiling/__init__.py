"""Compiles Triton kernels in other processes before their first launch.

In: a kernel and the arguments that it will be launched with. Out: the compiled kernel in Triton's cache on disk.
Change: what is compiled, and which launches wait: `compile_ahead.py`; the processes: `compile_pool.py`; what one runs: `compile_worker.py`.
Change: what a process is sent: `compile_job.py`.
"""
