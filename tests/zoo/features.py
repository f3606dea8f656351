"""What a model has that paging must respect: from the proved specs where there are any, and from its modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from paged_attn.attn_ops.specs.latent import LatentSpec

STATE = re.compile(r"Mamba|DeltaNet|DeltaAttention|LightningAttention|RecurrentBlock|Rwkv|Mixer|xLSTM|ShortConv|LinearAttention|CCA")
EXPERTS = re.compile(r"Experts$|MoE|Moe.*(Block|MLP)|SparseMoe")


def spec_features(specs: Sequence[Any]) -> list[str]:
    """Words for the attention layers, as proved from the graph."""
    tests: dict[str, Callable[[Any], bool]] = {
        "GQA": lambda s: 1 < s.num_kv_heads < s.num_q_heads,
        "MQA": lambda s: s.num_kv_heads == 1 < s.num_q_heads and not isinstance(s, LatentSpec),
        "latent": lambda s: isinstance(s, LatentSpec),
        "window": lambda s: s.sliding_window is not None,
        "chunk": lambda s: s.chunk is not None,
        "softcap": lambda s: s.softcap is not None,
        "sinks": lambda s: s.has_sinks,
        "ALiBi": lambda s: s.alibi_slopes is not None,
        "bias by distance": lambda s: s.bias_index == "distance",
        "bias by key": lambda s: s.bias_index == "key",
        "unequal dims": lambda s: _qk_dim(s) != (s.value_dim if isinstance(s, LatentSpec) else s.v_head_dim),
        "odd scale": lambda s: abs(s.scale * _qk_dim(s) ** 0.5 - 1) > 1e-3,
        "bidirectional": lambda s: not s.causal,
    }
    found = [word for word, test in tests.items() if any(spec.by_backend and test(spec) for spec in specs)]
    found += ["history"] * (not all(spec.by_backend for spec in specs))
    if len({spec.kv_layer for spec in specs}) < len(specs):
        found.append("shared KV")
    if any(spec.differences(specs[0]) not in ([], ["kv_layer"]) for spec in specs):
        found.append("layers differ")
    return found


def _qk_dim(spec: Any) -> int:
    """Of the model's own attention."""
    return int(spec.key_dim + spec.rotated if isinstance(spec, LatentSpec) else spec.qk_head_dim)


def module_features(model: nn.Module) -> list[str]:
    names = {type(module).__name__ for module in model.modules()}
    found = []
    if any(EXPERTS.search(name) for name in names):
        found.append("MoE")
    if any(STATE.search(name) for name in names):
        found.append("state")
    if any(hasattr(module, "kv_b_proj") for module in model.modules()):
        found.append("MLA")
    return found
