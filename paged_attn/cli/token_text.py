"""Tokens as text, or as ids if the model has no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_attn.engine.llm import LLM
    from paged_attn.engine.requests.outputs import Completion


def ids_text(ids: Sequence[int]) -> str:
    """Token ids as `--prompt-ids` takes them."""
    return ",".join(map(str, ids))


def completion_text(llm: LLM, completion: Completion) -> str:
    """Its text; without a tokenizer its ids."""
    return ids_text(completion.token_ids) if llm.tokenizer is None else completion.text


def token_text(llm: LLM, token: int) -> str:
    """Its text in quotes; without a tokenizer its id."""
    return str(token) if llm.tokenizer is None else repr(llm.tokenizer.decode([token]))
