"""The self-check: the first use proves a model on numbers. docs/self_check.md says what and how.

In: what is served, and the original. Out: nothing, or an UnsupportedError that names the part, what was measured and what is allowed.
`self_check.py` is for rewritten graphs, `hooked.py` for hooked models.
Change: how both sides are run: `runs/`; what is compared, and what is allowed: `compare/`, `paged_attn/tolerances.py`.
"""
