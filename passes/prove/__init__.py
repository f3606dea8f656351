"""What a found attention computes, proved on values: mask, bias, scale, softcap, sinks; and compared with what
the config claims. `score_function.py` proves scale, softcap and sinks of attention that is written out; `latent.py`
proves that keys and values are linear maps of one row.

In: an `AttentionSite` and the model's tensors. Out: an `AttentionProof`, or an UnsupportedError that says
what was seen.
"""
