"""Tools for FX graphs, shared by passes.

In: a graph or a node. Out: facts about it, slices of it, values of it.
Change: reading and editing nodes: `graph_tools.py`; what is written in place, and views: `memory.py`.
Change: slicing and evaluating, and how far results may be off: `slicing.py`; slices that `torch.vmap` was traced in: `vmap_levels.py`.
Change: which axes are rows of tokens: `token_data.py`, `row_layout.py`; the call that was traced, and its values: `call_form.py`.
Change: facts of the model: `model_facts.py`; numbers: `constants.py`, `mask_literals.py`.
"""
