"""`python -m tests.zoo.variants [TYPES...]`: each type with one attribute of its tiny config changed at a time, a JSON line each.

With `--together SEED`, each type once, with three of these changes drawn at random.

Checkpoints of a type differ in what its default config does not show: biases, another rotary embedding, one KV head, a router that does not
normalise. What `run_one` says of the default config it says of each of these.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers

from tests.zoo.configs import TYPES, config_for
from tests.zoo.run_one import run

TIMEOUT = 240  # seconds of one variant
TOGETHER = 3  # changes
# Attributes that change no computation of ours, or make the model another kind of model.
LEFT_OUT = (
    "output_", "return_dict", "is_encoder", "is_decoder", "add_cross", "use_cache", "tie_", "torchscript", "use_mamba_kernels", "pruned",
    "chunk_size_feed", "tf_legacy", "remove_invalid", "gradient", "cross_attention", "early_stop", "do_sample",
)  # fmt: skip
SCALES = ("multiplier", "scal", "softcap", "clip", "residual", "temperature", "alpha", "limit", "factor")
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 32, "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 3.0, 4.0],
    },
)  # fmt: skip
VALUES: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1, 4), "num_kv_heads": (1, 4), "head_dim": (16,), "sliding_window": (5, None), "num_experts_per_tok": (1, 3),
    "moe_topk": (1, 3), "hidden_act": ("relu", "gelu"), "hidden_activation": ("relu", "gelu"), "activation_function": ("relu", "gelu"),
    "scoring_func": ("softmax", "sigmoid"), "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"), "q_lora_rank": (None,),
}  # fmt: skip
EAGER = {"attn_implementation": "eager"}


def variants_of(model_type: str) -> list[dict[str, Any]]:
    """Changes of its tiny config, of one attribute each; the last is the model with its attention written out."""
    config = config_for(model_type).to_dict()
    found: list[dict[str, Any]] = []
    for name, value in sorted(config.items()):
        if name.startswith(("_", *LEFT_OUT)) or (name.startswith("num_k") and "kv_lora_rank" in config):
            continue
        found += [{name: other} for other in _others(name, value) if other != value or isinstance(other, bool) != isinstance(value, bool)]
    return [*found, EAGER]


def together(model_type: str, seed: int) -> dict[str, Any]:
    """Some three changes of different attributes at once, drawn from `variants_of`."""
    chance = random.Random(f"{model_type} {seed}")
    found: dict[str, Any] = {}
    for changes in chance.sample(changed := variants_of(model_type), min(TOGETHER, len(changed))):
        found |= changes
    return found


def _others(name: str, value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif name == "rope_parameters":
        if isinstance(value, dict) and "rope_type" in value:
            kept = {key: value[key] for key in ("rope_theta", "partial_rotary_factor", "mrope_section") if key in value}
            yield from ({**kept, **rope} for rope in ROPES)
    elif name == "layer_types" and isinstance(value, list):
        yield value[::-1]
    elif name in VALUES and (value is not None or name == "sliding_window"):
        yield from VALUES[name]
    elif isinstance(value, float) and any(part in name for part in SCALES):
        yield value * 1.7 if value else 0.5
    elif value is None and ("softcap" in name or "clip" in name):
        yield 3.0


def report(model_type: str, changes: dict[str, Any]) -> None:
    print(json.dumps({"changes": changes, **run(model_type, changes)}))


def in_a_child(work: Callable[[], Any]) -> int:
    """The exit status of a forked process that does it; one that takes too long is ended."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(TIMEOUT)
    work()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.variants", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("types", nargs="*", metavar="TYPE", help="by default all")
    parser.add_argument("--together", type=int, metavar="SEED", help="three changes at once, drawn at random")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    asked = parser.parse_args()
    for model_type in asked.types or TYPES:
        try:
            variants = variants_of(model_type) if asked.together is None else [together(model_type, asked.together)]
        except Exception as error:  # noqa: BLE001 - reported, as in run_one
            print(json.dumps({"type": model_type, "result": "no_oracle", "reason": f"{type(error).__name__}: {error}"[:200]}), flush=True)
            continue
        for changes in variants:
            status = in_a_child(partial(report, model_type, changes))
            if status:
                print(json.dumps({"changes": changes, "type": model_type, "result": "crash", "reason": f"status {status}"}), flush=True)


if __name__ == "__main__":
    main()
