"""What makes a paged graph faster and changes no number: one folder each."""
