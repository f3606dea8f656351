"""Linear layers of one input merged into one (`merge.py`), and single rows through a kernel of their own
(`gemv.py`).
"""
