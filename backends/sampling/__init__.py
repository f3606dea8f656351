"""Kernels that choose tokens: the largest logit of each row, or one drawn by its settings. Called by
`engine/sampling`.
"""
