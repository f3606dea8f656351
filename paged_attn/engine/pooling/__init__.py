"""Embeddings, classes and scores of texts.

In: a model without cache (`paged_attn/calling/body.py`) that an engine runs, and texts. Out: `outputs.py`. Per-request data
is in `../requests/`.
Change: body and head: `pooler.py`; a checkpoint's defaults: `sentence_transformers.py`.
Change: what a call runs, and how its results are read, and tokens of pairs: `plans.py`; methods of `LLM`: `calls.py`.
"""
