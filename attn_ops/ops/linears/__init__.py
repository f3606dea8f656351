"""Linear layers as ops.

In: rows and a weight. Out: rows.
Change: a kernel for a single row, and results in float32: `linear.py`; each row's adapter: `lora.py`.
Change: a residual addition and a norm in front of a product: `add_norm.py`.
"""
