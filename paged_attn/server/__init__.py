"""An OpenAI-compatible HTTP server over one `AsyncLLM`; needs the extra `serve`.

In: HTTP requests. Out: JSON, or server-sent events. `app.py` assembles it, `run.py` runs it.
Change: routes and fields: `api/`; limits and errors before any route: `http/`; logs, metrics, traces: `logs/`.
Change: files of requests: `batch_file.py`.
Change: settings: `settings.py`; what routes share: `state.py`; signals and draining: `run.py`.
"""
