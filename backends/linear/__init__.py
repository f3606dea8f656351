"""Matrix products for a single row (GEMV), bound by the memory that the weight lies in. Called by the op
`paged_attn::linear`.
"""
