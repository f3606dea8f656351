"""Tool-call formats; all subclass `tool_format.py`.

In: text that may hold a call. Out: names and arguments.
Change: which format a template uses: `choose.py`; calls in one section (DeepSeek, Kimi): `section.py`.
Change: arguments between tags: `tagged.py`; JSON, alone (Llama) or between tags (Hermes): `json_calls.py`; any other: the file of its name.
"""
