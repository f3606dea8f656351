"""The `paged-attn` command."""
