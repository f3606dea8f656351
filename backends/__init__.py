"""Kernels behind contracts, what they can run as data, and the selection among them."""
