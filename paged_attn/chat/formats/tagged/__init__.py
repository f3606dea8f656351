"""Formats of tool calls whose arguments are plain text between tags.

In: text that may hold a call. Out: names and arguments.
Change: what the formats share: `tagged_format.py`; what a text means by the tool's schema: `argument_values.py`.
Change: a format: its file, and its line in `../choose.py`.
"""
