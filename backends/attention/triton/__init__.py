"""Our own Triton kernels: `backend.py` plans, `attend_kernel.py` computes, `together/` is for decodes that share keys, `hopper/` is
long prefill on SM90, `latent/` is attention to latents, `parts.py` merges what several programs computed, `tiling.py` has launch numbers.
"""
