"""Fields of bodies that need checks of their own.

In: values of a body. Out: checked values, counted before anything is built from them.
Change: how large a field may be: `bounds.py`; schemas, grammars and choices that an answer must follow: `answer_forms.py`.
"""
