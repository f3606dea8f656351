"""`python -m tests.zoo.run_one TYPE`: one JSON line that says whether paged_attn gives the tokens of the unmodified model."""

from __future__ import annotations

import json
import re
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.recurrent.layer import RecurrentLayer
from tests.oracle import random_prompts
from tests.zoo.build import build
from tests.zoo.features import module_features, spec_features
from tests.zoo.in_bfloat16 import in_bfloat16
from tests.zoo.oracle import Oracle, Tokens, oracle
from tests.zoo.overrides import NOT_STANDALONE

LENGTHS = (1, 5, 17, 33, 70)
NEW_TOKENS = 12
PAGE_SIZES = (1, 16)
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})
ATTENTION = "attn_implementation"
ROOT = Path(__file__).resolve().parents[2]


def first_sentence(words: str) -> str:
    """One line: up to the first full stop, with the next line where the first one ends in a colon, and torch.compile's cause."""
    lines = [line.strip() for line in words.strip().splitlines() if line.strip()] or [""]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    sentence = re.split(r"(?<=[a-z0-9\])'\"])\. (?=[A-Z])", line)[0].strip().rstrip(".:")[:400]
    cause = re.search(r"^Caused by: *([^#\n]+)", words, re.MULTILINE)
    return f"{sentence} (caused by: {cause[1].strip().rstrip(':')})" if cause else sentence


def paged_tokens(model: torch.nn.Module, prompts: Tokens, found: dict[str, Any]) -> dict[str, Tokens]:
    """The engine's tokens by run; `found` gets what the proofs found."""
    runs = {}
    for page_size in PAGE_SIZES:
        with LLM(model, page_size=page_size, max_batch_tokens=16, num_pages=800 // page_size + 10) as llm:
            runner = llm.engine.runner
            layers = runner.compiled.rewrite.layers
            found["features"] = spec_features([layer.spec for layer in layers]) + found["modules"]
            found["found_by"] = sorted({layer.found_by for layer in layers}) + sorted({where_state_is(layer) for layer in runner.recurrent})
            for cache in ("cold", "warm"):
                completions = llm.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
                runs[f"page size {page_size}, {cache} cache"] = [c.token_ids for c in completions]
    return runs


def where_state_is(layer: RecurrentLayer) -> str:
    if not layer.cache_name:
        return "state in attributes"
    return "state in the cache" if layer.state_at is None else "state given and given back"


def verdict(runs: dict[str, Tokens], truth: Oracle) -> tuple[str, str]:
    """The result and its reason, from the tokens of all runs."""
    values = list(runs.values())
    if truth.disagrees and all(value == values[0] for value in values):
        matched = "generate" if values[0] == truth.generated else "its calls without a cache" if values[0] == truth.looped else ""
        if matched:
            return "ambiguous", f"the model's generate and its calls without a cache disagree; we match {matched}"
    assert truth.truth is not None
    for name, tokens in runs.items():
        for prompt, (ours, theirs) in enumerate(zip(tokens, truth.truth, strict=True)):
            if ours != theirs:
                step = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
                return "wrong", f"{name}: prompt of {LENGTHS[prompt]} tokens differs from new token {step} on: {ours} instead of {theirs}"
    return ("no_oracle", truth.weakness) if truth.weakness else ("ok", "")


def following_generate(model: torch.nn.Module, prompts: Tokens, truth: Oracle) -> str:
    """What is to be said of a model whose generate() and plain calls differ, when generate() is followed."""
    with LLM(model, page_size=16, max_batch_tokens=16, num_pages=60, follow_generate=True) as llm:
        completions = llm.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    equal = [c.token_ids for c in completions] == truth.generated
    return "every token equals generate()'s" if equal else "tokens DIFFER from generate()'s"


def crash_reason(error: Exception) -> str:
    """The error and the last line of this project that it passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(ROOT)) and ".venv" not in f.filename]
    where = f" at {Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {first_sentence(str(error))[:300]}"


def run(model_type: str, changes: Mapping[str, Any] = NO_CHANGES) -> dict[str, Any]:
    """`changes`: of the tiny config; `attn_implementation` is set on the model."""
    started = time.perf_counter()
    report: dict[str, Any] = {
        "type": model_type, "result": "", "reason": "", "features": [], "found_by": [], "parameters": 0, "seconds": 0.0,
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    if model_type in NOT_STANDALONE:
        return report | {"result": "no_oracle", "reason": NOT_STANDALONE[model_type]}
    try:
        model = build(model_type, **{name: value for name, value in changes.items() if name != ATTENTION})
        if ATTENTION in changes:
            model.set_attn_implementation(changes[ATTENTION])
    except Exception as error:  # noqa: BLE001 - reported: a type that cannot be built is a result
        return report | {"result": "no_oracle", "reason": f"no tiny config: {type(error).__name__}: {first_sentence(str(error))[:200]}"}
    report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    report["modules"] = report["features"] = module_features(model)
    prompts = random_prompts(LENGTHS)
    truth = oracle(model, prompts, NEW_TOKENS)
    report |= {"oracle_failures": truth.failures, "oracle_disagrees": truth.disagrees, "sensitivity": round(truth.sensitivity, 3),
               "weakness": truth.weakness, "oracle_seconds": round(time.perf_counter() - started, 1)}  # fmt: skip
    try:
        runs = paged_tokens(model, prompts, report)
        report["result"], report["reason"] = verdict(runs, truth) if truth.truth is not None else ("no_oracle", truth.weakness)
        if report["result"] == "ok":
            assert truth.truth is not None
            report["bf16"] = in_bfloat16(model, [prompt + tokens for prompt, tokens in zip(prompts, truth.truth, strict=True)], NEW_TOKENS)
    except UnsupportedError as error:
        report |= {"result": "refused", "reason": first_sentence(str(error)), "words": str(error)[:2000]}
        if "follow_generate=True" in str(error):
            report["reason"] += f"; with follow_generate=True {following_generate(model, prompts, truth)}"
    except Exception as error:  # noqa: BLE001 - a crash is a result
        report |= {"result": "crash", "reason": crash_reason(error), "words": traceback.format_exc()[-3000:]}
    return report | {"seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(json.dumps(run(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
