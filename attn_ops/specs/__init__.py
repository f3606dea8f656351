"""What one layer computes, frozen and printable: passes prove it, backends are asked about it.

In: numbers that a proof found. Out: a frozen spec (`AttentionSpec`, `LatentSpec`, `DualChunkSpec`, `ExpertsSpec`, ...). A new
kind of operation gets a file here, of its own name.
"""
