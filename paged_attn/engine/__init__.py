"""Continuous batching: `scheduling/` decides, `steps/` runs, `output_processor.py` commits; `engine.py` is that loop, `llm.py` its face.

In: prompts and `SamplingParams`. Out: events of tokens, and completions.
Change: settings: `config.py`; their other names: `setting_names.py`; how a model becomes a runner: `build_runtime.py`.
Change: what callers give: `prompts.py`, `sampling_params.py`, `generation_config.py`; what makes a request of it: `input_processor.py`.
Change: requests that reach one rank alone: `lead.py`.
"""
