"""A model as one graph with a symbolic number of tokens: `trace_model.py`, and what need not make a trace
fail.
"""
