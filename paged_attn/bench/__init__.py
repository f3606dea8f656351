"""`paged-attn bench`: the same prompts through this engine and its peers, each in a process of its own."""
