"""Continuous batching. A step is: `scheduling/` decides, `steps/` runs, `output_processor.py` commits;
`engine.py` is that loop, `llm.py` its face.

In: prompts and `SamplingParams`. Out: events of tokens, and completions. Settings: `config.py`. How a model
becomes a runner: `build_runtime.py`.
"""
