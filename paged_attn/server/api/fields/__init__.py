"""Fields of bodies that have a form of their own.

In: values of a body. Out: checked ones, counted before anything is built from them.
Change: how much a field may hold: `bounds.py`; schemas, grammars and choices that an answer has to follow: `answer_forms.py`.
"""
