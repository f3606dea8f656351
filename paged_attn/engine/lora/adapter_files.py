"""Reads peft LoRA adapters from a folder or a live PeftModel. Anything that would be served incorrectly is refused by name."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.shown import shown

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
ALONE = "Alone it may be served as part of the model: LLM(peft_model), and with compile=False if that cannot be traced"
_READ = ("peft_type", "r", "lora_alpha", "alpha_pattern", "use_rslora", "bias", "init_lora_weights")
# What has done its work when the weights are there, or is for training.
_WITHOUT_EFFECT = frozenset({
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "target_modules",
    "exclude_modules", "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "rank_pattern", "megatron_config",
    "megatron_core", "loftq_config", "eva_config", "qalora_group_size", "ensure_weight_tying",
})  # fmt: skip
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # with any other value, peft changes the model's own weights on load
_FACTOR = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight$")
_CARRIED = re.compile(r"^(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.(weight|bias)$")


class Factors(NamedTuple):
    """The factors for one linear layer: what is added is scale * b @ (a @ x); a [r, K], b [N, r]."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """Factors by the path of the linear layer that they belong to; `source` for messages. `carried`: parameters of the model itself that
    peft saved with them, by name, as it does for embeddings and lm_head: they must be those that the model has."""

    factors: dict[str, Factors]
    source: str
    carried: dict[str, Tensor]


def read_adapter(source: Any, name: str) -> Adapter:
    """An adapter from the folder that `save_pretrained` wrote, or from a live PeftModel: the one of that name, else the active one.
    What was read before stays as it is.

    Raises:
        ValueError: no such folder, or no adapter in it.
        UnsupportedError: a setting or a weight that would not be served right, by its name.
        TypeError: neither a path nor a model of peft.
    """
    if isinstance(source, Adapter):
        return source
    if isinstance(source, str | Path):
        return _from_folder(Path(source).expanduser())
    if isinstance(source, nn.Module) and hasattr(source, "peft_config"):
        return _from_model(source, name)
    raise TypeError(
        f"the adapter {shown(name)} is a {type(source).__name__}; allowed: the folder that save_pretrained wrote, or a PeftModel"
    )


def _from_folder(folder: Path) -> Adapter:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"there is no {CONFIG} in {shown(str(folder))}; give the folder that save_pretrained of a PeftModel wrote")
    config = json.loads((folder / CONFIG).read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{folder / CONFIG} holds a {type(config).__name__}; allowed: the settings of one adapter")
    _check(config, str(folder))
    return _adapter(config, _weights(folder), str(folder))


def _weights(folder: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found = next((folder / name for name in (WEIGHTS, PICKLED) if (folder / name).is_file()), None)
    if found is None:
        raise ValueError(f"there is neither {WEIGHTS} nor {PICKLED} in {shown(str(folder))}; save the adapter again")
    try:
        return load_file(found) if found.name == WEIGHTS else torch.load(found, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{shown(str(found))} cannot be read ({shown(str(error))}); copy or save the adapter again") from error


def _from_model(model: Any, name: str) -> Adapter:
    from peft import get_peft_model_state_dict

    active = model.active_adapter
    chosen = name if name in model.peft_config else active
    if not isinstance(chosen, str):
        raise UnsupportedError(f"{type(model).__name__} has several active adapters, {active}; name one of {', '.join(model.peft_config)}")
    source = f"the adapter {chosen!r} of a {type(model).__name__}"
    config = model.peft_config[chosen].to_dict()
    config["peft_type"] = getattr(config["peft_type"], "value", config["peft_type"])
    _check(config, source)
    weights = get_peft_model_state_dict(model, adapter_name=chosen, save_embedding_layers=False)
    return _adapter(config, weights, source)


def _check(config: Mapping[str, Any], source: str) -> None:
    """Raises UnsupportedError, which names a setting that changes what is computed in a way that is not served."""
    for setting, allowed in (("peft_type", "LORA"), ("bias", "none")):
        if (got := {"bias": "none", **config}.get(setting)) != allowed:
            raise UnsupportedError(f"{source}: {setting} is {got!r}; allowed: {allowed!r}. {ALONE}")
    if (start := config.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        raise UnsupportedError(
            f"{source}: init_lora_weights is {start!r}, which changes the model's own weights; convert the adapter with peft's "
            f"save_pretrained(..., path_initial_model_for_weight_conversion=...). {ALONE}"
        )
    for setting, value in config.items():
        if value and setting not in _READ and setting not in _WITHOUT_EFFECT:
            raise UnsupportedError(f"{source}: {setting} is {value!r}, which is not served for adapters chosen by request. {ALONE}")


def _adapter(config: Mapping[str, Any], weights: Mapping[str, Tensor], source: str) -> Adapter:
    found: dict[str, dict[str, Tensor]] = {}
    carried: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        if (match := _FACTOR.match(key)) is not None and tensor.dim() == 2:
            found.setdefault(match[1], {})[match[2]] = tensor
        elif "lora_" not in key and (match := _CARRIED.match(key)) is not None:
            carried[f"{match[1]}.{match[2]}"] = tensor
        else:
            raise UnsupportedError(f"{source}: {key} {list(tensor.shape)} is not a factor of a linear layer (lora_A or lora_B). {ALONE}")
    if not found:
        raise ValueError(f"{source} holds no weights")
    factors = {}
    for module, pair in found.items():
        if pair.keys() != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            shapes = {f"lora_{letter}": list(tensor.shape) for letter, tensor in pair.items()}
            raise ValueError(f"{source}: {module} has {shapes}; allowed: lora_A [r, inputs] and lora_B [outputs, r]")
        rank = pair["A"].shape[0]
        alpha = _alpha(config, module, source)
        factors[module] = Factors(pair["A"], pair["B"], alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    return Adapter(factors, source, carried)


def _alpha(config: Mapping[str, Any], module: str, source: str) -> float:
    """lora_alpha, or what the first expression of alpha_pattern that fits the end of a path says, as peft reads its patterns."""
    pattern = config.get("alpha_pattern") or {}
    if not isinstance(pattern, Mapping):
        raise ValueError(f"{source}: alpha_pattern is {shown(pattern)}; allowed: a number for each expression of module names")
    try:
        fitting = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(fitting, config.get("lora_alpha", 8))
    except re.error as error:
        raise ValueError(f"{source}: alpha_pattern has an expression that cannot be read ({error}); correct {CONFIG}") from error
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ValueError(f"{source}: the alpha of {module} is {shown(alpha)}; allowed: a number; correct {CONFIG}")
    return alpha
