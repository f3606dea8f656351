"""Linear layers of one input merged into one (`merge.py`), single rows through a kernel of their own
(`gemv.py`), products in float32 of tensors in 16 bits (`float32_products.py`), and adapters added to what
they give (`lora.py`, in a variant of the graph).
"""
