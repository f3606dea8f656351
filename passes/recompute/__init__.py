"""Attention that no spec describes (its mask comes from hidden states, its heads are mixed): evaluated anew on
all tokens of a request.
"""
