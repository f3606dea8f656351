"""Before any route: connections, who asks, size and shape of bodies, and errors in the form that clients
expect. `call.py` is one request from its arrival to the end of its answer.
"""
