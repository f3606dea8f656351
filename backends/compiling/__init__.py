"""Kernels compiled before they are launched. In: what will be launched (`compile_ahead.py`). Out: compiled kernels in Triton's cache and
Inductor's. `compile_pool.py` keeps processes for it, `compile_worker.py` is what one of them runs, `compile_job.py` what it is sent.
"""
