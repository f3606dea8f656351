"""A record of a benchmark as tables, as a chart, and beside each peer."""
