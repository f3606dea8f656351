"""What operators see: a line for each request (`call_log.py`), metrics (`metrics.py`), traces (`tracing.py`)."""
