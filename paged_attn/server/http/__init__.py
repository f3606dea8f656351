"""Before any route: connections, tenants, limits of bodies, errors.

In: a connection. Out: a request that a route may answer, or an error in the form that OpenAI's clients expect.
Change: limits of connections and slow clients: `http_protocol.py`; of bodies: `guard.py`, `body_limits.py`.
Change: API keys and tenants: `callers.py`; errors: `errors.py`; clients that leave: `disconnect.py`.
Change: what a request is from arrival to its end: `call.py`.
"""
