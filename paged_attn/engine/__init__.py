"""The engine: requests, scheduling, sampling, and `LLM` in front of them."""
