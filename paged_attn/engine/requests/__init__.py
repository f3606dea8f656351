"""One request on its way through the engine (`request.py`), the row of it that every step reads (`request_rows.py`), its text
(`detokenizer.py`), and what comes out of it (`outputs.py`: `TokenEvent`, `Completion`).
"""
