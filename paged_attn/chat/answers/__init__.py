"""Answers taken apart, as they come. In: text. Out: parts (`../parts.py`). `answer_form.py` makes a reader for each answer:
`reader.py` by tags (`reasoning.py`) and formats of calls (`call_splitter.py`), `response_template.py` by what the tokenizer
says.
"""
