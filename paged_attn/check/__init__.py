"""The self-check, which compares a model numerically with the original before first use; see docs/design/self_check.md.

In: the served model and the original. Out: nothing, or an UnsupportedError that names the part, what was measured and what is allowed.
`self_check.py` is for rewritten graphs, `hooked.py` for hooked models.
Change: how both sides are run: `runs/`; what is compared, and what is allowed: `compare/`, `paged_attn/tolerances.py`.
"""
