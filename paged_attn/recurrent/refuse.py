"""The words for models with recurrent state on roads that keep none for a request."""

from __future__ import annotations

from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.calling.call_signature import takes
from paged_attn.recurrent.discover import recurrent_modules, without_engine


def refuse_recurrent(model: nn.Module, path: str, advice: str = "only paged_attn.LLM(model), which traces the model, has one") -> None:
    """Raise UnsupportedError if the model, run on a few tokens with a cache of its own, writes recurrent state into it."""
    if not takes(model, "input_ids") or not hasattr(model, "get_input_embeddings"):
        return
    with without_engine(model) as inputs_of:
        found = recurrent_modules(model, inputs_of)
    if found:
        others = f" (and {len(found) - 1} more like it)" if len(found) > 1 else ""
        raise UnsupportedError(
            f"{type(model).__name__} keeps recurrent state in {found[0]}{others}, and {path} has no place for the state of several "
            f"requests; {advice}"
        )
