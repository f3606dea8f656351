"""Splitting a rewritten graph at registered ops, and compiling the pieces between them."""
