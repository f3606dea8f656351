"""Our own Triton kernels: decode, extend, KV write, and the backend that runs them."""
