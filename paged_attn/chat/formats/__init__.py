"""How models write calls of tools: one file for each format, all after `tool_format.py`.

In: text that may hold a call. Out: names and arguments.
Change: which format a template means: `choose.py`; what formats share whose calls stand in one section: `section.py`.
Change: formats with arguments between tags: `tagged.py`; plain JSON, and Llama's: `json_calls.py`; any other: the file of its name.
"""
