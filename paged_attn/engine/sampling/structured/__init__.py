"""Answers that follow a JSON schema, an expression or a grammar: read in a process of their own, then masks
for each token.
"""
