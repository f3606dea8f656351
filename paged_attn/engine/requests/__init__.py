"""One request on its way through the engine.

In: prompt tokens and params. Out: a `TokenEvent` for each new token, and one `Completion`; for pooling a pooled row.
Change: what is known of a request: `request.py`; what every step reads of all of them, as columns: `request_rows.py`.
Change: text and stop strings: `detokenizer.py`; what callers get: `outputs.py`; a step's events: `token_events.py`.
Change: what embeddings may ask: `pooling_params.py`; how their rows add up over steps: `pooled_rows.py`.
"""
