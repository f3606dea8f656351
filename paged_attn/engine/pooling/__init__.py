"""Embeddings, classes and scores of texts. In: a model without cache (`calling/body.py`) that an engine runs, and texts. Out: `outputs.py`.

`pooler.py`: a model with its head (`head.py`) and its checkpoint's defaults (`sentence_transformers.py`). `texts.py`:
tokens of texts and pairs. The methods of `LLM` are in `engine/pooling_calls.py`; what a request carries lies in `requests/`.
"""
