"""Replaces a proved attention by an op.

In: an `AttentionSite` and its proof. Out: the graph with `unified_attention_with_output`, `latent_attention_with_output` or the op of dual
chunk attention in its place.
Change: the three replacements: `attention.py`, `latent.py`, `dual_chunk.py`.
Change: K and V before they are repeated over heads: `kv_heads.py`; K and V that layers share: `same_kv.py`; the layout of operands:
`operand_layout.py`.
"""
