"""Running one step: through a captured graph where one fits (`step_runner.py`), in flight until the host has
its tokens (`in_flight.py`).
"""
