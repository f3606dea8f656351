"""A proved attention becomes `unified_attention_with_output`: K and V before they were repeated over heads,
operands as they lie. One over a latent becomes `latent_attention_with_output` (`latent.py`).
"""
