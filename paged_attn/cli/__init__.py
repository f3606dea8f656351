"""The `paged-attn` command. Start with `main.py`.

In: flags. Out: text or JSON, and an exit status.
Change: a command: `commands/`; flags that commands share: `options.py`, of the server `serve_options.py`, of a layer `problem.py`.
Change: loading and running prompts: `job.py`; what is printed: `report.py`, `token_text.py`; what does not parse: `parser.py`.
Change: `--check`: `check.py`; the smoke test: `smoke.py`.
"""
