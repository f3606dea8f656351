"""What is compared and what is allowed: noise measured on the model, ragged steps, windows, long positions,
later tokens; then whose fault it is.
"""
