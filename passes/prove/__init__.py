"""Proves on values what a found attention computes, and compares it with what the config claims.

In: an `AttentionSite` and the model's tensors. Out: an `AttentionProof`, or an UnsupportedError that shows what was found.
Change: masks: `mask_family.py`, `mask_proof.py`, `mask_probe.py`, of no family `other_mask.py`; biases: `bias_family.py`.
Change: claims of the config: `config_claims.py`.
Change: scale, softcap and sinks of attention that is written out: `score_function.py`, `score_subgraph.py`.
Change: keys and values as linear maps of one row: `latent.py`; three queries per token: `dual_chunk.py`.
Change: the whole proof: `attention.py`; evaluating a part of a graph: `subgraph_probe.py`.
"""
