"""A model as one graph with a symbolic number of tokens.

In: a model. Out: a `CompiledGraph`, or an UnsupportedError that says why not. Start with `trace_model.py`.
Change: how a model is called and captured: `trace_model.py`; what is set aside meanwhile: `while_tracing.py`; messages: `trace_failure.py`.
Change: how modules are called: `module_calls.py`.
Change: modules that become ops: `opaque_modules.py` (untraceable), `on_all_tokens.py` (mix tokens), `experts_as_ops.py` and `looping/`
(experts), `experts_layout.py` (where their weights are).
Change: layers that are copied instead of traced: `repeated/`.
Change: models that give the last logits alone: `last_token.py`; ropes by length: `ropes_by_length.py`; ops without fakes:
`ops_without_fakes.py`; einx: `einx_calls.py`.
"""
