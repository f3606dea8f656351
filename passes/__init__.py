"""FX rewrites of a Dynamo graph: found by structure, proved on numbers, replaced. `runner.py` has the order;
`pass_list.py` prints it.
"""
