"""How models write calls of tools. In: text that may hold a call. Out: names and arguments. One file for each format, all after
`tool_format.py`; `section.py` is what formats share whose calls stand in one section, `tagged/` holds those with arguments between tags.
`choose.py` tells which one a template means.
"""
