"""What makes a paged graph faster: a file or a folder each. `linear_float32` alone adds up in another order."""
