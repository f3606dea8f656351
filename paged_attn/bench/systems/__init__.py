"""The systems that can be measured, one file each.

In: a `Job`. Out: tokens and seconds, in its `Log`.
Change: a system: its file, and an entry in `systems.py`; the model that all run: `model_source.py`.
Change: messages between processes, and sampling, the same for all: `job.py`.
"""
