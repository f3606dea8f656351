"""Our own Triton kernels for attention.

In: a step's batch and one layer's tensors. Out: the layer's output rows. `backend.py` plans, `launch.py` calls the kernel.
Change: what a score is: `attend_kernel.py`; which keys a tile sees: `tiles.py`; sums of split items: `parts.py`.
Change: how work is distributed: `work_partition.py`, `plan_kernels.py`, of decode steps `deal_kernel.py`; a step's plan: `plan.py`.
Change: launch parameters: `tiling.py`; how long a deterministic step may be: `deterministic.py`.
Change: decodes that share keys: `together/`; long prefill on SM90: `hopper/`; attention to latents: `latent/`.
"""
