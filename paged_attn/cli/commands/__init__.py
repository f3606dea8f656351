"""The commands, one file each.

In: parsed flags. Out: an exit status.
Change: a command: its file, which has `HELP` and `run`, and `add_options` where it has flags; a new one: its line in `../main.py`, too.
"""
