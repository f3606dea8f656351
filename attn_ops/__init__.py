"""The op, the forward context, layer specs, batches, KV pools and the radix tree. Imports no kernel and no pass."""
