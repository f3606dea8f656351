"""Turns a rewritten graph into kernel launches.

In: a rewritten FX graph. Out: pieces, compiled, and recorded in CUDA graphs.
Change: where a graph is cut: `split/`; compiling pieces and keeping them on disk: `compiled_pieces/`; CUDA graphs: `graphs/`.
Change: what we change about Inductor's kernels: `inductor/`.
"""
