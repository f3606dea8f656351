"""Attention backends. `base.py` is their contract, `capabilities.py` what a kernel can run, as data.

In: a plan of one step and one layer's tensors. Out: the layer's output rows.
Backends, one file or folder each: `BUILT_IN` of `backends/selection/registry.py`; known names that are refused: `UNSUPPORTED` there.
Around them: `by_group.py` (layers in groups), `hybrid.py` (one for prefill, one for decode), `flash_style.py` (common code of the
FlashAttention backends), `decode_only/`, `latent/` (latent attention with any of them).
Change: your own backend: a file of your package, and a line of its entry points `paged_attn.backends` (`examples/own_backend.py`).
Change: one built in: a file here and a line in `BUILT_IN`.
"""
