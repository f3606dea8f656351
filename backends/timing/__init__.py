"""Times backends side by side, each checked first, for `paged-attn tune` and `benchmarks/kernels.py`.

In: a `TimedProblem`. Out: a `Timing` for each backend, or the reason why it has none.
Change: what is timed: `problem.py`, `inputs.py`; the checks and their tolerances: `time_backends.py`; the clock, and what a timing
reports: `run.py`.
"""
