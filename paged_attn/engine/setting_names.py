"""Settings under other names: those of the last release, which work for one more with a warning, and those that other engines use."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Mapping
from typing import Any

NEW_NAMES = {"early_rows": "early_logits_gather", "one_row_linears": "gemv", "early_launches": "pdl"}
NEW_VALUES = {("graphs", "pieces"): "piecewise"}
GONE = {"rope_and_store": "it gained a percent at most and cost two for batches of 128"}

# What means the same elsewhere, by the names of vLLM, SGLang and transformers.
SAME_SETTING = {
    "block_size": "page_size", "num_gpu_blocks_override": "num_pages", "max_num_seqs": "max_requests",
    "max_running_requests": "max_requests", "max_num_batched_tokens": "max_batch_tokens", "enable_prefix_caching": "prefix_cache",
    "attention_backend": "backend",
}  # fmt: skip
# What has no setting of that meaning: what to do instead.
OTHER_SETTING = {
    "gpu_memory_utilization": "kv_memory_gib says how many GiB KV may take; by default it is 80 % of what weights and graphs leave free",
    "mem_fraction_static": "kv_memory_gib says how many GiB KV may take; by default it is 80 % of what weights and graphs leave free",
    "max_model_len": "a request may be as long as the model's positions and the pool allow; num_pages or kv_memory_gib bound the pool",
    "enforce_eager": "graphs='off' captures nothing, inductor=False compiles nothing",
    "kv_cache_dtype": "keys and values are kept in the model's dtype; there is no other yet",
    "quantization": "load the quantised model with transformers and give LLM the model itself",
    "quantization_config": "load the quantised model with transformers and give LLM the model itself",
    "load_format": "weights are read as transformers reads them",
    "gguf_file": "load the model with transformers (from_pretrained(..., gguf_file=...)) and give LLM the model itself",
    "trust_remote_code": "load the model with transformers (from_pretrained(..., trust_remote_code=True)) and give LLM the model itself",
    "revision": "load the model with transformers (from_pretrained(..., revision=...)) and give LLM the model itself",
    "tensor_parallel_size": "start the program under torchrun with one process for each GPU (docs/parallel.md)",
    "tp_size": "start the program under torchrun with one process for each GPU (docs/parallel.md)",
    "swap_space": "a request that loses its pages computes them again; nothing is swapped",
    "seed": "each request has a seed of its own: SamplingParams(seed=...)",
    "disable_log_stats": "llm.engine.stats has the numbers; nothing is logged",
    "enable_lora": "give LLM a model of peft with its adapter active; several adapters in one batch are not served yet",
}
SAME_PARAM = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "stop_strings": "stop", "guided_json": "json_schema",
    "guided_regex": "regex", "guided_grammar": "grammar",
}  # fmt: skip
OTHER_PARAM = {
    "do_sample": "temperature=0 is greedy, any other temperature samples",
    "n": "give the prompt n times; requests over HTTP have n",
    "best_of": "give the prompt several times with logprobs, and keep the best",
    "num_beams": "there is no beam search; transformers' own generate on pages has it (docs/generate.md)",
    "use_beam_search": "there is no beam search; transformers' own generate on pages has it (docs/generate.md)",
    "max_length": "max_new_tokens counts the new tokens alone",
    "min_tokens": "there is no least number; ignore_eos=True goes on after end tokens, up to max_new_tokens",
    "min_new_tokens": "there is no least number; ignore_eos=True goes on after end tokens, up to max_new_tokens",
    "bad_words": "forbid tokens by logit_bias={id: -100}, or by one of transformers' logits processors in logits_processors",
    "include_stop_str_in_output": "a completion's token_ids hold the stop string, its text ends before it",
    "skip_special_tokens": "texts are decoded without special tokens; token_ids hold them",
    "detokenize": "an LLM without a tokenizer decodes nothing",
    "no_repeat_ngram_size": "give transformers' NoRepeatNGramLogitsProcessor in logits_processors",
    "typical_p": "give transformers' TypicalLogitsWarper in logits_processors",
}


def familiar(given: Mapping[str, Any], same: Mapping[str, str]) -> dict[str, Any]:
    """The same by our names, where other engines have another name for it.

    Raises:
        ValueError: one under both names.
    """
    if given.keys().isdisjoint(same):
        return dict(given)
    for theirs, ours in same.items():
        if theirs in given and ours in given:
            raise ValueError(f"{theirs} is {ours} here, and both are given; leave {theirs} out")
    return {same.get(name, name): value for name, value in given.items()}


def what_instead(name: str, known: Collection[str], other: Mapping[str, str]) -> str:
    """Of a name that nobody knows here: what does that, or which name is near; "" if nothing comes near."""
    if name in other:
        return other[name]
    near = difflib.get_close_matches(name, [*known, *other], n=1)
    return f"did you mean {near[0]}?" if near else ""


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings of an engine by their names and values of today, from those of the last release or of other engines.

    Raises:
        ValueError: a setting under both names, or one that is gone and was switched on.
    """
    settings: dict[str, Any] = {}
    for name, value in familiar(given, SAME_SETTING).items():
        if name in GONE:
            if value:
                raise ValueError(f"{name}={value!r}: this setting is gone, {GONE[name]}; leave it out")
            _warn(f"the setting {name} is gone, {GONE[name]}")
            continue
        new = NEW_NAMES.get(name, name)
        if new != name:
            if new in given:
                raise ValueError(f"{name} is the old name of {new}, and both are given; leave {name} out")
            _warn(f"the setting {name} is called {new} now; the old name goes with the next release")
        if isinstance(value, str) and (new, value) in NEW_VALUES:
            _warn(f"{new}={value!r} is called {NEW_VALUES[new, value]!r} now; the old word goes with the next release")
            value = NEW_VALUES[new, value]
        settings[new] = value
    return settings


def _warn(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=4)
