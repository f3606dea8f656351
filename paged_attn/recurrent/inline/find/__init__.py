"""What a layer does with a state, read from the graph of a token's step.

In: the graph. Out: a recurrence, a window or a scan of channels, with the tensors that it is made of; nothing is changed or proved.
Change: which recurrences are known: `linear.py`, `corrections.py` (delta rules), `selective.py` (Mamba).
Change: windows of the last rows: `windows.py`; states that are read in any way: `channels.py`; how views are followed: `dims.py`.
Change: how a tensor follows from a state: `forms.py`; tensors as products of smaller ones: `factors.py`.
"""
