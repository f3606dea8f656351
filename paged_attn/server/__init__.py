"""An OpenAI-compatible HTTP server over one `AsyncLLM`; needs the extra `serve`. `app.py` puts it together,
`run.py` runs it.
"""
