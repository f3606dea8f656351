"""One request of the engine.

In: prompt tokens and params. Out: a `TokenEvent` for each new token, and one `Completion`; for pooling, a pooled row.
Change: the data of a request: `request.py`; the part that every step reads, as columns: `request_rows.py`.
Change: text and stop strings: `detokenizer.py`; of single tokens: `token_texts.py`; what callers get, and a step's events: `outputs.py`.
Change: parameters of embedding requests, and pooling over several steps: `pooled_rows.py`.
"""
