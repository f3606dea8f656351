"""Embeddings, classes and scores of texts. In: a model without cache (`calling/body.py`) that an engine runs, and texts. Out: `outputs.py`.

`pooler.py`: a model with its head (`head.py`) and its checkpoint's defaults (`sentence_transformers.py`). `plans.py`: what a call runs, and
how its answer is read; `calls.py`: the methods of `LLM`; `texts.py`: tokens of texts and pairs. What a request carries lies in `requests/`.
"""
