"""Before any route: connections, who asks, size and shape of bodies, and errors in the form that clients
expect.
"""
