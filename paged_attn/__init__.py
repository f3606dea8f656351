"""Paged, ragged, prefix-shared attention for any Hugging Face causal LM: `torch.compile(model, backend="paged_attn")`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

# In a checkout `attn_ops`, `passes`, ... lie beside this folder; an installed wheel has them inside it.
_ROOT = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "attn_ops").is_dir() and (_ROOT / "attn_ops" / "op.py").is_file():
    __path__.append(str(_ROOT))

__version__ = "0.1.0"

_EXPORTS = {
    "AttentionSpec": "attn_ops.spec",
    "Batch": "attn_ops.batch",
    "BatchRequest": "attn_ops.batch",
    "ForwardMode": "attn_ops.batch",
    "KVPool": "attn_ops.kv_pool",
    "PageAllocator": "attn_ops.page_allocator",
    "RadixCache": "attn_ops.radix_cache",
    "UnsupportedError": "attn_ops.errors",
    "current_context": "attn_ops.context",
    "forward_context": "forward",
    "attention_layers": "inspection",
    "explain": "inspection",
    "patch": "hf_patch",
    "PagedCache": "hf_cache",
    "register_split_op": "capture.split_ops",
    "EngineConfig": "engine.config",
    "Completion": "engine.request",
    "LLM": "engine.llm",
    "SamplingParams": "engine.sampling_params",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'paged_attn' has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(importlib.import_module(f"paged_attn.{_EXPORTS[name]}"), name)
