"""How models write calls of tools. In: text that may hold a call. Out: names and arguments. One file for each format, all
after `tool_format.py`; `choose.py` tells which one a template means.
"""
