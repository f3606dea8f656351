"""The `paged-attn` command. Start with `main.py`.

In: flags. Out: text or JSON, and an exit status.
Change: a command: `commands/`; flags that commands share: `options.py`; the server's: `serve_options.py`; a layer's: `problem.py`.
Change: loading and running prompts: `job.py`; what is printed: `report.py`, `token_text.py`; errors of the parser: `parser.py`.
Change: `--check`: `check.py`; the smoke test: `smoke.py`.
"""
