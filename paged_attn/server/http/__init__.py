"""What happens before any route: connections, tenants, limits on bodies, errors.

In: a connection. Out: a request that a route may answer, or an error in the form that OpenAI's clients expect.
Change: limits on connections and slow clients: `http_protocol.py`; of bodies: `guard.py`, `body_limits.py`.
Change: API keys and tenants: `callers.py`; errors: `errors.py`.
Change: one request from arrival to end: `call.py`; clients that disconnect, and streams: `disconnect.py`.
"""
