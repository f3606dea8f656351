"""Proving a rewritten model on numbers.

In: the graph as it was traced, the rewritten one in pieces, and what the model's user would call. Out: nothing, or an UnsupportedError
that names where they part. `self_check` is the whole of it for a traced model, `hooked` for one whose attention is hooked; `closeness`
has every tolerance, `steps` the small ragged batches, `truth` and `noise` what the original computes and what rounding does to it.
"""
