"""A user's model is called and left as it was: modes, hooks, configs, caches; and how its forward wants to be
called.
"""
