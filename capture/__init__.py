"""From a rewritten graph to launches: split it, compile the pieces, record them in CUDA graphs."""
