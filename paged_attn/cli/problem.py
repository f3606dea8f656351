"""One attention layer as flags, for `backends` and `tune`: given number by number, or read from a model's config."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from paged_attn.attn_ops.specs.attention import AttentionSpec

NUMBERS = {"q_heads": "query heads", "kv_heads": "KV heads", "head_dim": "head dim of q and k", "v_head_dim": "head dim of v"}
DEFAULTS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}  # Llama 3.1 8B's
PAGE_SIZE = 16
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LayerShape:
    """An attention layer, its dtype and the size of its pages."""

    spec: AttentionSpec
    dtype: torch.dtype
    page_size: int

    def __str__(self) -> str:
        return f"{self.spec.describe()}, {str(self.dtype).removeprefix('torch.')}, pages of {self.page_size}"


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layer (default: that of Llama 3.1 8B)")
    group.add_argument("--model", metavar="DIR_OR_HUB_ID", help="take heads, dims and dtype from a model's config; no weights are loaded")
    for name, words in NUMBERS.items():
        default = f" (default: {DEFAULTS[name]})" if name in DEFAULTS else " (default: --head-dim)"
        group.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=words + default)
    group.add_argument("--dtype", choices=DTYPES, help="of queries, keys and values (default: bfloat16 on a GPU, float32 on a CPU)")
    group.add_argument("--page-size", type=int, metavar="N", help=f"tokens per KV page (default: {PAGE_SIZE})")


def shape_is_given(args: argparse.Namespace) -> bool:
    return any(getattr(args, name) is not None for name in (*NUMBERS, "model", "dtype", "page_size"))


def layer_shape(args: argparse.Namespace, device: torch.device) -> LayerShape:
    """A plain causal layer: flags, over the model's config, over the defaults. Raises ValueError: a number below 1; heads that do not
    divide; a config without one of them."""
    import torch

    from paged_attn.attn_ops.specs.attention import AttentionSpec

    found: dict[str, Any] = dict(DEFAULTS)
    found["dtype"] = torch.bfloat16 if device.type == "cuda" else torch.float32
    if args.model is not None:
        found |= config_shape(args.model)
    found |= {name: value for name in NUMBERS if (value := getattr(args, name)) is not None}
    if args.dtype is not None:
        found["dtype"] = getattr(torch, args.dtype)
    if args.v_head_dim is None and (args.head_dim is not None or "v_head_dim" not in found):
        found["v_head_dim"] = found["head_dim"]
    found["page_size"] = PAGE_SIZE if args.page_size is None else args.page_size
    for name, value in found.items():
        if name != "dtype" and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; allowed are values of at least 1")
    heads, dim = (found["q_heads"], found["kv_heads"]), found["head_dim"]
    return LayerShape(AttentionSpec(*heads, dim, found["v_head_dim"], dim**-0.5), found["dtype"], found["page_size"])


def config_shape(model: str) -> dict[str, Any]:
    """Heads, dims and dtype by the names that transformers' configs have for them. Raises ValueError: no config there, or one without
    attention heads."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except OSError as error:
        raise ValueError(f"no model at {model!r}: {error}") from error
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    head_dim = getattr(text, "head_dim", None) or (hidden // heads if heads and hidden else None)
    if not heads or not head_dim:
        raise ValueError(
            f"the config of {model!r} ({text.model_type}) does not say its attention heads; give --q-heads, --kv-heads and --head-dim"
        )
    found = {
        "q_heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "v_head_dim": head_dim,
    }
    if (nope := getattr(text, "qk_nope_head_dim", None)) is not None:  # latent attention, whose K and V of every head are in the pages
        found |= {"kv_heads": heads, "head_dim": nope + text.qk_rope_head_dim, "v_head_dim": text.v_head_dim}
    return found | ({"dtype": config.dtype} if config.dtype is not None else {})
