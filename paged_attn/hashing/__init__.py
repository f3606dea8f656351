"""What a model, its code and its tensors are, as text that is equal in two processes exactly if they are.

In: a model, or any Python value. Out: text and hashes, which name graphs on disk.
Change: what of a model counts: `model_text.py`; of live values: `stable_hasher.py`; of code: `code_text.py`.
Change: which files a trace went through: `code_files.py`; the names of tensors: `owned_tensors.py`.
"""
