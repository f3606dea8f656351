"""Kernels behind contracts, their capabilities as data, and the selection among them.

In: one layer's tensors and the step's plan. Out: the layer's rows.
Change: kernels of a kind of operation: the folder of its name; which backend runs a model: `selection/`; timing them: `timing/`.
Change: what backends may require of a machine: `needs.py`, `devices.py`, `machine.py`; of strides: `unit_stride.py`.
Change: launching without specializing again: `fast_launch.py`; compiling kernels in other processes: `compiling/`.
"""
