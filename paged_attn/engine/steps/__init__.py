"""Runs one step of the engine.

In: a `ScheduledStep`. Out: the tokens and scores of its requests.
`step_layout.py` builds the columns of a batch, `step_runner.py` runs it, in a captured graph if one fits, and an `InFlightStep` holds the
results until they arrive on the host.
Change: what is captured: `capture_specs.py`; whole graph or pieces: `step_runner.py`; what `explain` reports: `capture_report.py`.
Change: tokens that the host does not know yet: `future_tokens.py`; what the host waits for: `in_flight.py`.
Change: one token through a graph traced for more: `one_row_check.py`; threads on a CPU: `thread_choice.py`.
"""
