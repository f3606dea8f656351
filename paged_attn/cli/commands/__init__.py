"""The commands, one file each.

In: parsed flags. Out: an exit status.
Change: a command: its file, with `HELP`, `run` and, if it has flags, `add_options`; a new one also needs a line in `../main.py`.
"""
