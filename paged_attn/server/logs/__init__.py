"""What operators see: a line for each request, metrics, traces."""
