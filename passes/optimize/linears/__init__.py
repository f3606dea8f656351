"""Linear layers of one input merged into one (`merge.py`), single rows through a kernel of their own
(`gemv.py`), and adapters added to what they give (`lora.py`, in a variant of the graph).
"""
