"""What one layer computes, frozen and printable: passes prove it, backends are asked about it.

In: numbers that a proof found. Out: a frozen spec (`AttentionSpec`, `LatentSpec`, `DualChunkSpec`, `ExpertsSpec`, ...).
Change: a spec: the file of its kind; a new kind of operation gets one of its own name.
"""
