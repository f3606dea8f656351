"""Running one step of the engine.

In: a `ScheduledStep`. Out: the tokens and scores of its requests, once the device has them.
`step_layout.py` makes a batch of it, `step_runner.py` runs that, in a captured graph where one fits, and an `InFlightStep` holds it.
Change: what is captured: `capture_specs.py`; whole graph or pieces: `step_runner.py`; what `explain` says of it: `capture_report.py`.
Change: tokens that the host does not know yet: `future_tokens.py`; what a step waits for: `in_flight.py`.
Change: one token through a graph traced for more: `one_row_check.py`; threads on a CPU: `thread_choice.py`.
"""
