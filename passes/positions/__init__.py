"""Values that a model makes from the number of tokens become functions of the batch's positions, proved on
ragged rows.
"""
