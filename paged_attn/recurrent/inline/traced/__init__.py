"""What is changed in the graph of a layer's step before it is read.

In: the graph, as it was traced. Out: the same numbers from operations that can be read, or that take less memory.
Change: states that are stepped part by part: `parts.py`; products with weights that were repeated for each row: `repeated_weights.py`;
convolutions of which only the last columns are used: `last_columns.py`.
"""
