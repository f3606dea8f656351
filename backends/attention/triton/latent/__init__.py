"""Attention of many heads over one row per token (a `LatentSpec`), whose first elements are the value too.

In: the step's dealt work (`WorkPartition`) and an `AttentionCall`. Out: the call's rows. `attend_kernel.py` loads each tile of rows once,
as key and as value; `merge_kernel.py` joins the parts of items that were cut; `launch.py` calls both; `tiling.py` has the launch numbers.
"""
