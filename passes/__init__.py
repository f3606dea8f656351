"""FX passes over a Dynamo graph: find attention by structure, prove it numerically, replace it, and then make the graph faster.

In: a Dynamo graph and facts about its model. Out: the rewritten graph and a `Rewrite` that says what was done.
Change: one pass: `find/`, `prove/`, `replace/`, `positions/`, `recompute/`, `optimize/`; tools for graphs: `fx/`.
Change: the passes and their order: `pass_list.py`; which may be left out: `optional.py`; how they run, and dumps: `runner.py`.
Change: how proved attentions are replaced, layer by layer: `replace_layers.py`; what a rewrite reports: `report.py`.
"""
