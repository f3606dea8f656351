"""Traced and rewritten graphs on disk, so that the next process that loads the same model need not trace it."""
