"""Our own Triton kernels: `backend.py` plans, `attend_kernel.py` computes, `hopper_*` is long prefill on SM90,
`tiling.py` has the launch numbers.
"""
