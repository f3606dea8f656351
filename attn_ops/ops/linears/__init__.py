"""Linear layers as ops: with a kernel for a single row, and with adapters that each request chooses."""
