"""What attention operations are, and what one step gives them: specs, ops, the forward context, batches, KV
memory, recurrences over packed rows. No kernel, no pass. `context.py` comes first: an op finds the rest there.
"""
