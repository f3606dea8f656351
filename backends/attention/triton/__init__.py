"""Our own Triton kernels: `backend.py` plans, `attend_kernel.py` computes, `hopper_*` is long prefill on SM90,
`latent/` is attention to latents, `tiling.py` has the launch numbers.
"""
