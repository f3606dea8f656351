"""What runs a model's steps: `TracedRunner` (traced and rewritten) or `HookedRunner` (hooked), behind
`runner.py`.
"""
