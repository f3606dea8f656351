"""Kernels behind contracts, what they can run as data, and the selection among them.

In: one layer's tensors and the step's plan. Out: the layer's rows.
Change: kernels of a kind of operation: the folder of its name; which backend runs a model: `selection/`; timing them: `timing/`.
Change: what any backend may need of a machine: `needs.py`, `devices.py`, `machine.py`.
Change: launching without specialising again: `fast_launch.py`; compiling kernels in other processes: `compiling/`.
"""
