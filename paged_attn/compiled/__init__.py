"""One Dynamo graph, rewritten, split and compiled. `paged_attn/compiled_graph.py` runs it.

In: a Dynamo graph and options. Out: a `RewrittenGraph`, with its inputs by role.
Change: the steps from graph to pieces: `rewritten_graph.py`; its inputs: `graph_inputs.py`; options of torch.compile: `options.py`.
Change: the variant with adapters: `lora_graph.py`; kernels compiled ahead: `steps_ahead.py`, `experts_ahead.py`.
"""
