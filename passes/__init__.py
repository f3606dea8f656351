"""FX passes over a Dynamo graph: attention is found by structure, proved numerically, replaced; then the graph is made faster.

In: a Dynamo graph and facts of its model. Out: the rewritten graph and a `Rewrite` that says what was done.
Change: the passes and their order: `pass_list.py`; which may be left out: `optional.py`; how they run: `runner.py`; dumps: `dump.py`.
Change: how proved attentions are replaced, layer by layer: `replace_layers.py`; what is told: `report.py`.
"""
