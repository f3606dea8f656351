"""Paged, ragged, prefix-shared attention for any Hugging Face causal LM: `torch.compile(model, backend="paged_attn")`.

In: an unmodified model. Out: `LLM`, `AsyncLLM`, a server, or a compiled model whose calls run on pages.
Change: the public names, each imported when it is first used: `_EXPORTS` in this file; everything else is in the rooms of DESIGN.md.
Change: what torch.compile calls: `dynamo_backend.py`; what it gets back: `compiled_graph.py`; contexts of callers' own steps: `forward.py`.
Change: when two results count as equal: `tolerances.py`; how the parts of a start are timed: `stopwatch.py`.
Change: Ctrl-C during bookkeeping: `interrupts.py`; progress bars: `progress.py`; values in messages: `shown.py`; prompts that are cut to a
length: `truncation.py`.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "AsyncLLM": "asynchronous.async_llm",
    "AttentionSpec": "attn_ops.specs.attention",
    "Batch": "attn_ops.batch.batch",
    "BatchRequest": "attn_ops.batch.batch",
    "ForwardMode": "attn_ops.batch.batch",
    "KVPool": "attn_ops.kv.kv_pool",
    "PageAllocator": "attn_ops.kv.page_allocator",
    "RecurrentStates": "recurrent.states",
    "RadixCache": "engine.memory.radix_cache",
    "UnsupportedError": "attn_ops.errors",
    "current_context": "attn_ops.context",
    "forward_context": "forward",
    "attention_layers": "report.inspection",
    "explain": "report.inspection",
    "patch": "hf.patch",
    "PagedCache": "hf.cache",
    "engine_of": "hf.generate.kept_engine",
    "generate": "hf.generate.custom_generate",
    "generate_with": "hf.generate.custom_generate",
    "register_split_op": "capture.split.split_ops",
    "EngineConfig": "engine.config",
    "ChatCompletion": "chat.several",
    "ChatMessage": "chat.parts",
    "Completion": "engine.requests.outputs",
    "LLM": "engine.llm",
    "first_rank_leads": "engine.lead",
    "AttentionBackend": "backends.attention.base",
    "register_backend": "backends.selection.registry",
    "SamplingParams": "engine.sampling_params",
}
__all__ = sorted(_EXPORTS)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        near = "".join(f" (did you mean {each}?)" for each in difflib.get_close_matches(name, __all__, n=1))
        raise AttributeError(f"module 'paged_attn' has no attribute {name!r}{near}; it exports {', '.join(__all__)}")
    return getattr(importlib.import_module(f"paged_attn.{_EXPORTS[name]}"), name)
