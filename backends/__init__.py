"""Attention kernels behind one contract, their capabilities as data, and the selection among them."""
