"""Traces a model to one graph with a symbolic number of tokens.

In: a model. Out: a `CompiledGraph`, or an UnsupportedError that says why not. Start with `trace_model.py`.
Change: how a model is called and captured: `trace_model.py`; what is disabled meanwhile: `while_tracing.py`; errors: `trace_failure.py`.
Change: how modules are called: `module_calls.py`.
Change: modules that become ops: `opaque_modules.py` (untraceable), `on_all_tokens.py` (mix tokens), `experts_as_ops.py` and `looping/`
(experts), `experts_layout.py` (the layout of their weights).
Change: layers that are copied instead of traced: `repeated/`.
Change: models that return only the last logits: `last_token.py`; ropes by length: `ropes_by_length.py`; ops without fakes:
`ops_without_fakes.py`; einx: `einx_calls.py`.
"""
