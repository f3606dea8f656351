"""What runs a model's steps.

In: a model and settings. Out: a `Runner` (`runner.py`), called on rows of tokens: `TracedRunner` (traced and rewritten) or `HookedRunner`
(`hooked_runner.py`: the module itself under `paged_attn.patch`, not compiled).
Change: which runner, with which passes and kernels: `make_runner.py`; what a runner must provide: `runner.py`.
Change: how a trace is bound to a model: `traced_runner.py`, merged weights: `merged_weights.py`.
Change: detecting changes of a live model: `model_watch.py`; processes that compile kernels: `compilers.py`.
"""
