"""Where attention is in a graph: every finder returns an `AttentionSite`. A new spelling is a new finder in
`attention.py`.
"""
