"""The first use proves a model on numbers: `self_check.py` for compiled models, `hooked.py` for hooked ones;
docs/self_check.md says what and how.

`runs/` computes the values of both sides, `compare/` judges them.
"""
