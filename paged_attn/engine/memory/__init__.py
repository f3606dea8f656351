"""Pages and state slots of requests: taken, shared through the prefix cache, given back whatever happens; and
how many fit.
"""
