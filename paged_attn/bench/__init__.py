"""`paged-attn bench`: the same prompts through this engine and its peers, each in a process of its own.

In: flags. Out: tables, JSON, a chart. Start with `session.py`.
Change: prompts: `workloads.py`; models with random weights: `shapes.py`; a peer: `systems/`; tables and chart: `results/`.
Change: what is timed: `measure.py`; processes: `launch.py`, `worker.py`; facts about the machine: `machine.py`.
"""
