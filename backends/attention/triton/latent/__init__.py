"""Attention of many heads over one row per token (a `LatentSpec`), whose first elements are also the value.

In: the step's `WorkPartition` and an `AttentionCall`. Out: the layer's output rows.
Change: the kernel, which loads each tile of rows once: `attend_kernel.py`; parts of split items: `merge_kernel.py`.
Change: on Hopper: `hopper_kernel.py`, `hopper_producer.py`; the launches: `launch.py`; launch parameters: `../tiling.py`.
"""
