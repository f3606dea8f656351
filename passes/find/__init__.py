"""Finds attention in a graph.

In: a graph. Out: an `AttentionSite` for each attention.
Change: a new spelling: a finder in `FINDERS` of `attention.py`. Finders: `sdpa.py`, `softmax.py`, `weights_as_softmax.py`, `dual_chunk.py`.
Change: other spellings, which are first brought into these: `spellings/`.
Change: what a site holds: `attention_site.py`; matrix products: `products.py`.
Change: the row from which keys and values are computed: `latent.py`.
"""
