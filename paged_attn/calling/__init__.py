"""A user's model is called and left as it was: modes, hooks, configs, caches, compiled calls; and how its
forward wants to be called.
"""
