"""Specs of what one layer computes, frozen and printable. Passes prove specs; backends declare which ones they run.

In: numbers that a proof found. Out: a frozen spec (`AttentionSpec`, `LatentSpec`, `DualChunkSpec`, `ExpertsSpec`, ...).
Change: a spec: the file of its kind; a new kind of operation gets a file of its own.
"""
