"""What is known about a model before it is traced.

In: a path or name, or a loaded model. Out: the model and its tokenizer, its limits and its task, or a refusal that says why.
Change: what `LLM` is given: `given_model.py`; how a checkpoint is read, and what is refused: `loading.py`, `load_options.py`; by which
class: `auto_class.py`.
Change: vocabulary, positions, end tokens: `model_limits.py`; whether it generates, embeds or classifies: `task.py`.
Change: what its forward must return: `model_output.py`, `rows_of_logits.py`; whether it is causal: `causality.py`; its own
`generate`: `own_generate.py`.
Change: what counts as a change of the model: `model_state.py`.
"""
