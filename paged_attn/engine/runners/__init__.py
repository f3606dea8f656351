"""What runs a model's steps: `ModelRunner` (traced and rewritten) or `PatchedRunner` (hooked), behind
`runner.py`.
"""
