"""Settings under other names: our earlier names, which still work with a warning, and those of other engines."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

logger = logging.getLogger("paged_attn")
PREFIX = "PAGED_ATTN_"
OTHERS = ("PAGED_ATTN_API_KEY", "PAGED_ATTN_CACHE", "PAGED_ATTN_DUMP", "PAGED_ATTN_TUNED")  # variables that are not engine settings
OF_TESTS = f"{PREFIX}TEST_"

F = TypeVar("F", bound=Callable[..., Any])
NEW_NAMES = {"early_rows": "early_logits_gather", "one_row_linears": "gemv", "early_launches": "pdl"}
NEW_VALUES = {("graphs", "pieces"): "piecewise"}
GONE = {"rope_and_store": "it gained a percent at most and cost two for batches of 128"}

# What means the same elsewhere, by the names of vLLM, SGLang and transformers.
SAME_SETTING = {
    "block_size": "page_size", "num_gpu_blocks_override": "num_pages", "max_num_seqs": "max_requests",
    "max_running_requests": "max_requests", "max_num_batched_tokens": "max_batch_tokens", "enable_prefix_caching": "prefix_cache",
    "attention_backend": "backend", "mamba_ssm_cache_dtype": "state_dtype",
}  # fmt: skip
# Values of `dtype`.
SAME_DTYPE = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
# What has no setting of that meaning: what to do instead.
OTHER_SETTING = {
    **dict.fromkeys(
        ("gpu_memory_utilization", "mem_fraction_static"),
        "kv_memory_gib says how many GiB KV may take; by default it is 80 % of what weights and graphs leave free",
    ),
    **dict.fromkeys(("kv_cache_dtype", "kv_dtype"), "keys and values are kept in the model's dtype; there is no other yet"),
    **dict.fromkeys(
        ("tensor_parallel_size", "tp_size", "pipeline_parallel_size", "distributed_executor_backend"),
        "start the program under torchrun with one process for each GPU (docs/parallel.md)",
    ),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit"), "quantization_config=... of transformers quantises while it is read"),
    **dict.fromkeys(
        ("attn_implementation", "hf_overrides"), "load the model yourself and give it: LLM(AutoModelForCausalLM.from_pretrained(...))"
    ),
    **dict.fromkeys(("speculative_backend", "speculative_config"), "an LLM has no speculative decoding yet; leave it out"),
    "enforce_eager": "graphs='off' captures nothing, inductor=False compiles nothing",
    "quantization": "a quantised checkpoint is read as it is; quantization_config=... of transformers quantises while it is read",
    "load_format": "weights are read as transformers reads them",
    "enable_chunked_prefill": "prompts are always cut into steps of max_batch_tokens",
    "cpu_offload_gb": "a model lies on its GPU whole; several GPUs share it under torchrun (docs/parallel.md)",
    "runner": "task says what a model is for",
    "swap_space": "a request that loses its pages computes them again; nothing is swapped",
    "seed": "each request has a seed of its own: SamplingParams(seed=...)",
    "disable_log_stats": "llm.engine.stats has the numbers; nothing is logged",
    "torch_dtype": "dtype, as in dtype='float32'",
    "cache_dir": "HF_HOME says where the Hub's files lie, PAGED_ATTN_CACHE where traced graphs do",
    "device_map": "device='cuda' or 'cuda:1'; a model lies on one device whole, or is shared under torchrun (docs/parallel.md)",
    "compilation_config": "inductor, graphs and disable_passes say what is compiled and captured",
    "data_parallel_size": "one process for each GPU, and a load balancer (docs/parallel.md)",
    "enable_auto_tool_choice": "leave it out: tools are always on; --tool-parser names a format that the template does not show",
    "lora_modules": "loras={name: folder}, or --lora NAME=FOLDER as often as there are adapters",
    "enable_lora": "max_loras says how many adapters there is room for, loras={name: folder} loads them",
}
SAME_PARAM = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_new_tokens": "min_tokens",
    "num_return_sequences": "n", "stop_strings": "stop", "bad_words_ids": "bad_words", "guided_json": "json_schema",
    "guided_regex": "regex", "guided_grammar": "grammar",
}  # fmt: skip
OTHER_PARAM = {
    "do_sample": "temperature=0 is greedy, any other temperature samples",
    "best_of": "nothing is thrown away here: n gives that many answers, logprobs tells how likely each is, and you keep the best",
    "num_beams": "there is no beam search; transformers' own generate on pages has it (docs/generate.md)",
    "use_beam_search": "there is no beam search; transformers' own generate on pages has it (docs/generate.md)",
    "max_length": "max_new_tokens counts the new tokens alone",
    "suppress_tokens": "bad_words=[[id], ...] forbids single tokens",
    "spaces_between_special_tokens": "a text with special tokens (skip_special_tokens=False) is as the tokenizer decodes it",
    "detokenize": "an LLM without a tokenizer decodes nothing",
    "no_repeat_ngram_size": "give transformers' NoRepeatNGramLogitsProcessor in logits_processors",
    "structured_outputs": "use json_schema, regex or grammar",
    "guided_decoding": "use json_schema, regex or grammar",
    "guided_choice": "use regex, as in 'yes|no'",
    "choice": "use regex, as in 'yes|no'",
    "eos_token_id": "stop_token_ids ends at further tokens; the model's own end token counts unless ignore_eos=True",
    "length_penalty": "there is no beam search; transformers' own generate on pages has it (docs/generate.md)",
    "typical_p": "give transformers' TypicalLogitsWarper in logits_processors",
}


OTHER_CALL = {
    "prompt_token_ids": "a prompt may be a list of token ids: generate([[1, 2, 3]])",
    "use_tqdm": "progress=True or False says whether a bar is drawn",
    "lora_request": "lora='name' chooses an adapter that LLM(..., loras={'name': folder}) has loaded",
    "tokenizer": "an LLM has one tokenizer: LLM(model, tokenizer=...)",
}
OF_LLM = ("tokenizer", "dtype", "device", "revision", "trust_remote_code", "gguf_file", "quantization_config", "config", "progress")


def familiar(given: Mapping[str, Any], same: Mapping[str, str]) -> dict[str, Any]:
    """The same by our names, where other engines have another name for it. Raises ValueError: one under both names."""
    if given.keys().isdisjoint(same):
        return dict(given)
    for theirs, ours in same.items():
        if theirs in given and ours in given:
            raise ValueError(f"{theirs} is {ours} here, and both are given; leave {theirs} out")
    return {same.get(name, name): value for name, value in given.items()}


def with_hint(name: str, known: Collection[str], other: Mapping[str, str]) -> str:
    """A name that nobody knows here, in quotes, and what does that, or which name is near, if any comes near."""
    near = next(iter(difflib.get_close_matches(name, known, n=1)), "") or next(
        iter(difflib.get_close_matches(name, other, n=1, cutoff=0.8)), ""
    )
    hint = other.get(name) or (f"as {near}: {other[near]}" if near in other else f"did you mean {near}?" if near else "")
    return f"{name!r} ({hint})" if hint else repr(name)


def tells_names(what: str, elsewhere: Mapping[str, str], more: Iterable[str] = ()) -> Callable[[F], F]:
    """For a function that takes keywords: its TypeError for one that it does not know says which name is near, or where it goes.

    Args:
        what: the function's name, for messages; elsewhere: names that belong to something else, and what to do with them.
        more: names that it hands on, of its `**settings`.
    """

    def telling(function: F) -> F:
        known = [name for name in inspect.signature(function).parameters if name not in ("self", "settings")] + list(more)

        def check(given: Mapping[str, Any]) -> None:
            if not given.keys() <= set(known):
                name = next(name for name in given if name not in known)
                raise TypeError(f"{what} has no {with_hint(name, known, elsewhere)}; known: {', '.join(known)}")

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            check(given)
            return function(*args, **given)

        @functools.wraps(function)
        async def awaited(*args: Any, **given: Any) -> Any:
            check(given)
            return await function(*args, **given)

        return awaited if inspect.iscoroutinefunction(function) else checked  # type: ignore[return-value]

    return telling


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings of an engine by their names and values of today, from earlier ones or those of other engines. Raises ValueError: a
    setting under both names, or one that is gone and was switched on."""
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


def warn_of_unknown_variables(settings: Iterable[str]) -> None:
    """One warning for each variable that nothing reads; `settings`: the names of those that are settings."""
    known = [*settings, *OTHERS]
    for variable in sorted(os.environ.keys() - set(known)):
        if variable.startswith(PREFIX) and not variable.startswith(OF_TESTS):
            near = "".join(f"; did you mean {each}?" for each in difflib.get_close_matches(variable, known, n=1))
            logger.warning("nothing reads the environment variable %s%s", variable, near)
