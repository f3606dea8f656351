"""Describes a model, its code and its tensors as text that is equal in two processes if and only if they are equal.

In: a model, or any Python value. Out: text and hashes, which name graphs on disk.
Change: which parts of a model count: `model_text.py`; of live values: `stable_hasher.py`; of code: `code_text.py`.
Change: which files a trace went through: `code_files.py`; the names of tensors: `model_text.py`.
"""
