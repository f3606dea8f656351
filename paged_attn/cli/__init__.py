"""The `paged-attn` command: `main.py` parses; what commands share lies here, each command in `commands/`."""
