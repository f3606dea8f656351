"""PyTorch's flex_attention behind the contract: masks, windows and biases as functions that are compiled into
the kernel.
"""
