"""What we change about Inductor's Triton kernels.

In: Inductor's code. Out: the same with our changes, and a disk cache key that includes them (`cache_mark.py`).
Change: early starts (PDL): `pdl.py`; block sizes for many rows: `launch_sizes.py`.
Change: which reductions run along rows: `reductions.py`; reshapes of rows: `reshapes.py`.
Change: where Triton keeps what it compiled, and processes that compile: `triton_cache.py`; what they build: `launchers.py`.
"""
