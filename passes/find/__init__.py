"""Where attention is in a graph.

In: a graph. Out: an `AttentionSite` from every finder.
Change: a new spelling: a finder in `FINDERS` of `attention.py`. Finders: `sdpa.py`, `softmax.py`, `dual_chunk.py`; flex_attention is
written out before (`decompose_flex.py`).
Change: what a site holds: `attention_site.py`; matrix products: `products.py`; other layouts of scores: `score_layout.py`.
Change: the row that keys and values are made of: `latent.py`.
"""
