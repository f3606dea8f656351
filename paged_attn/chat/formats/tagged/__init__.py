"""Formats whose arguments are plain text between tags. `tagged_format.py` is what they share; `argument_values.py` tells by the tool's
schema which texts are meant as something else; then one file for each."""
