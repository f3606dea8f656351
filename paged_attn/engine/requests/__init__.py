"""One request on its way through the engine (`request.py`), the row of it that every step reads (`request_rows.py`), and its
text (`detokenizer.py`).
"""
