"""Where attention is in a graph: every finder returns an `AttentionSite`. A new spelling is a new finder in
`attention.py`. `latent.py` looks behind its keys and values for the one row that they are made of.
"""
