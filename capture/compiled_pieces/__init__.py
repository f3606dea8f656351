"""Pieces through Inductor, equal ones once, and their files on disk (`artifacts.py`), under a key of all that
decides the result.
"""
