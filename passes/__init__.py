"""FX rewrites of a Dynamo graph: found by structure, proved on numbers, replaced. `pass_list.py` has the
order, `runner.py` runs it; `paged-attn passes` prints it.
"""
