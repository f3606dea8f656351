"""Tool-call formats, one file each; all subclass `tool_format.py`.

In: text that may hold a call. Out: names and arguments.
Change: which format a template uses: `choose.py`; formats whose calls are in one section: `section.py`.
Change: formats with arguments between tags: `tagged.py`; plain JSON, and Llama's: `json_calls.py`; any other: the file of its name.
"""
