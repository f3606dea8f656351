"""`python -m tests.gpu.default_shapes --out FILE`: every causal-LM type of transformers at its config's own width, in bfloat16.

A config's defaults are the shape of the checkpoint that the type was made for, mostly. Here it keeps all of them but the number of
layers (the first, and one of each other kind) and, where that would not fit, of experts. Random weights. Asked of each type: does an
engine with default settings accept it, and are the logits of the same tokens as near to the float32 model's as transformers' own?
What the defaults leave open (GIVEN) is as in a checkpoint of the type. A false alarm of the self-check in 16 bits is seen here and not
with tiny models. One JSON line a type is added to the file.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import multiprocessing
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from paged_attn import UnsupportedError
from paged_attn.tolerances import row_errors
from tests.gpu.published_shapes import engine_of, spread
from tests.teacher_forced import by_engine, by_model
from tests.zoo.configs import TYPES, config_for, model_class
from tests.zoo.overrides import FULL, LINEAR, NOT_STANDALONE, ROPE, ROPES, SHARED_KV, SLIDING
from tests.zoo.run_one import first_sentence
from tests.zoo.shrink import LAYER_COUNTS, kinds_of_layers, per_layer_lists

LENGTHS = (1, 5, 33, 150, 300)
DECODED = 8
LAYERS = 2
MOST, FEWER_EXPERTS = 3e9, 16  # parameters, beyond which a layer has so many experts
EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts moe_num_primary_experts".split()
FURTHER = 1.25  # than transformers' own logits, in the median
GIVEN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": [SLIDING, FULL], "rope_parameters": {kind: {**rope, "mrope_section": [16, 24, 24]} for kind, rope in ROPES.items()},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 500_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "gemma3n_text": {
        **SHARED_KV, "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0], "intermediate_size": [16384] * 4,
        "vocab_size": 262144,  # more would have no row of the embeddings that each layer adds
    },
    "granitemoehybrid": {"layer_types": [LINEAR, FULL]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", FULL], "num_dense_layers": 1},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 128, "indexer_compress_ratio": 4,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"], "num_hidden_layers": 4},
}  # fmt: skip


def with_few_layers(config: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    """A config of the same class and numbers, and so its sub-configs, but with LAYERS layers or as many as there are kinds of them."""
    parts = {
        name: with_few_layers(part) for name in config.sub_configs if isinstance(part := getattr(config, name, None), PreTrainedConfig)
    }
    values = config.to_dict()
    counts = [name for name in LAYER_COUNTS if isinstance(values.get(name), int)]
    few: dict[str, Any] = dict.fromkeys(counts, LAYERS)
    lists = per_layer_lists(values, values[counts[0]]) if counts else {}
    if lists:
        chosen = kinds_of_layers(lists.values(), LAYERS)
        few = dict.fromkeys(counts, len(chosen)) | {name: [value[index] for index in chosen] for name, value in lists.items()}
    if getattr(config, "is_decoder", None) is False:
        few["is_decoder"] = True
    return type(config)(**{**few, **parts, **GIVEN.get(config.model_type, {}), **changes})


def default_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    config = CONFIG_MAPPING[model_type]()
    wanted = model_class(model_type).config_class
    assert wanted is not None
    if not isinstance(config, wanted):
        config = next(part for name in config.sub_configs if isinstance(part := getattr(config, name), wanted))
    return with_few_layers(config, **changes)


def build(config: PreTrainedConfig, model_type: str, device: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return model_class(model_type)._from_config(config, dtype=torch.bfloat16).eval().to(device)  # torch.normal asks no default device


def sized(model_type: str, tiny: bool) -> PreTrainedConfig:
    if tiny:
        return config_for(model_type)
    config = default_config(model_type)
    if sum(parameter.numel() for parameter in build(config, model_type, "meta").parameters()) > MOST:
        fewer = {name: FEWER_EXPERTS for name in EXPERTS if (getattr(config, name, None) or 0) > FEWER_EXPERTS}
        if fewer:
            config = default_config(model_type, **fewer)
    return config


def logits_without_a_cache(model: nn.Module, sequences: list[list[int]]) -> tuple[Any, Any]:
    """Of the float32 model with the same weights, and of this one."""
    exact = copy.deepcopy(model).float()
    truth = by_model(exact, sequences, DECODED)
    del exact
    gc.collect()
    return truth, by_model(model, sequences, DECODED)


def run(model_type: str, tiny: bool) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report: dict[str, Any] = {"type": model_type, "transformers": transformers.__version__}
    started = time.perf_counter()
    try:
        config = sized(model_type, tiny)
        model = build(config, model_type, device)
        vocabulary, longest = config.get_text_config().vocab_size, getattr(config.get_text_config(), "max_position_embeddings", None)
        generator = torch.Generator().manual_seed(3)
        lengths = [min(length, (longest or LENGTHS[-1] + DECODED) - DECODED) for length in LENGTHS]
        sequences = [torch.randint(2, vocabulary, (length + DECODED,), generator=generator).tolist() for length in lengths]
        report |= {"parameters": sum(p.numel() for p in model.parameters()), "hidden": getattr(config.get_text_config(), "hidden_size", 0)}
        exact, theirs = logits_without_a_cache(model, sequences)
    except Exception as error:  # noqa: BLE001 - a type that its own defaults cannot build or call is a result
        return report | {"result": "no oracle", "reason": f"{type(error).__name__}: {first_sentence(str(error))}"}
    report["oracle_seconds"] = round(time.perf_counter() - started, 1)
    if not all(bool(rows.isfinite().all()) for rows in theirs):
        return report | {"result": "no oracle", "reason": "the model gives NaN in bfloat16"}
    started = time.perf_counter()
    try:
        with engine_of(model) as llm:
            report["ready_seconds"] = round(time.perf_counter() - started, 1)
            ours = by_engine(llm.engine, sequences, DECODED)
    except UnsupportedError as refusal:
        return report | {"result": "refused", "reason": first_sentence(str(refusal)), "words": str(refusal)[:3000]}
    except Exception as error:  # noqa: BLE001 - a crash is a result
        return report | {
            "result": "crash",
            "reason": f"{type(error).__name__}: {str(error)[:300]}",
            "words": traceback.format_exc()[-4000:],
        }
    of_theirs, of_ours = (spread([row_errors(*pair) for pair in zip(exact, rows, strict=True)]) for rows in (theirs, ours))
    near = of_ours["median"] <= FURTHER * of_theirs["median"] + 1e-4
    return report | {"result": "ok" if near else "further", "reason": "", "theirs": of_theirs, "ours": of_ours}


def in_process(model_type: str, tiny: bool, answer: Connection) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    answer.send(run(model_type, tiny))


def run_apart(model_type: str, tiny: bool, seconds: float) -> dict[str, Any]:
    """In a process of its own, that ends after `seconds` whatever it does."""
    mine, its = multiprocessing.get_context("forkserver").Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=in_process, args=(model_type, tiny, its))
    process.start()
    its.close()
    report: dict[str, Any] = {"type": model_type, "result": "timeout", "reason": f"no answer in {seconds:.0f} s"}
    try:
        if mine.poll(seconds):
            report = mine.recv()
    except EOFError:
        report |= {"result": "died", "reason": "its process ended without an answer"}
    process.kill()
    process.join()
    return report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*", default=[name for name in TYPES if name not in NOT_STANDALONE])
    parser.add_argument("--out", type=Path, required=True, help="types that it holds are not run again")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=150, help="for one type")
    parser.add_argument("--until", type=float, default=float("inf"), help="Unix time after which no type begins")
    parser.add_argument("--tiny", action="store_true", help="tiny configs, to try this script on a CPU")
    options = parser.parse_args()
    done = {json.loads(line)["type"] for line in options.out.read_text().splitlines()} if options.out.exists() else set()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["paged_attn", "tests.gpu.default_shapes"])
    with options.out.open("a") as file, ThreadPoolExecutor(options.workers) as threads:

        def one(model_type: str) -> None:
            if time.time() < options.until:
                report = run_apart(model_type, options.tiny, options.seconds)
                file.write(json.dumps(report) + "\n")
                file.flush()
                print(f"{model_type}: {report['result']} {report['reason'][:150]}", flush=True)

        list(threads.map(one, [name for name in options.types if name not in done]))


if __name__ == "__main__":
    main()
