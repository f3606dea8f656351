"""Attention kernels. `base.py` is the contract on one screen, `capabilities.py` what a kernel can run, as
data; every other file or folder is a backend.

In: a plan of one step and one layer's tensors. Out: the layer's output rows. A new backend: one file in a
package of your own, and one line of the entry-point group `paged_attn.backends` (`examples/own_backend.py`);
or one here, and a line in `BUILT_IN` of `selection/registry.py`, too.
"""
