"""Experts' weights that a graph stacks lie stacked instead (`stack.py`): one tensor, of which the parameters become views."""
