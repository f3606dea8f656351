"""Continuous batching: `scheduling/` decides, `steps/` runs, `output_processor.py` commits; `engine.py` is the loop, `llm.py` the API.

In: prompts and `SamplingParams`. Out: events of tokens, and completions.
Change: settings: `config.py`; their names in vLLM and SGLang: `setting_names.py`; start-up: `build_runtime.py`.
Change: what callers pass: `prompts.py`, `sampling_params.py`, `generation_config.py`; how that becomes a request: `input_processor.py`.
Change: requests that reach only one rank: `lead.py`; queues by rank: `ranked_queue.py`.
Change: one request: `requests/`; pages and state slots: `memory/`; from logits to tokens: `sampling/`.
Change: what is known of a model: `model/`; tracing it: `tracing/`; what runs it: `runners/`; adapters: `lora/`; embeddings: `pooling/`.
"""
