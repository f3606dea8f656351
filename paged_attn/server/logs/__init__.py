"""Logs, metrics and traces for operators.

In: each request from its arrival to its end. Out: a line of the log, metrics, a trace.
Change: the line, how it is written, and the request's id: `call_log.py`; metrics: `metrics.py`; OpenTelemetry: `tracing.py`.
"""
