"""What is known of a model before it is traced: loading, limits, what it returns, whether it is causal, and
what changed in it since.
"""
