"""The same model in bfloat16: whether it is accepted, and how far its logits are from the float32 model's, beside transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn import LLM, UnsupportedError
from paged_attn.tolerances import row_errors
from tests.teacher_forced import by_engine, by_model

OF_A_MODEL = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError)
FURTHER = 1.25  # than transformers' own logits, in the median of 65 rows: another order of adding up
PAGE_SIZE, PAGES = 16, 40


def in_bfloat16(model: nn.Module, sequences: Sequence[Sequence[int]], decoded: int) -> dict[str, Any]:
    """Converts the model, which keeps that type.

    Args:
        sequences: token ids; the logits of the last `decoded` and of the one before are compared.

    Returns:
        `result`: ok; further; refused; or no oracle, where the model cannot be called so, or gives NaN, in bfloat16 by itself. `ours` and
        `theirs`: the median error of a row. `reason`.
    """
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.bfloat16())
    try:
        exact = by_model(model, sequences, decoded)
        theirs = by_model(model.to(torch.bfloat16), sequences, decoded)
    except OF_A_MODEL as error:
        return {"result": "no oracle", "reason": f"the model by itself: {type(error).__name__}: {error}"[:200]}
    if not all(bool(rows.isfinite().all()) for rows in theirs):
        return {"result": "no oracle", "reason": "the model gives NaN in bfloat16"}
    try:
        with LLM(model, page_size=PAGE_SIZE, max_batch_tokens=256, num_pages=PAGES) as llm:
            ours = by_engine(llm.engine, sequences, decoded)
    except UnsupportedError as refusal:
        return {"result": "refused", "reason": str(refusal)[:500]}
    found = {"ours": _median(exact, ours), "theirs": _median(exact, theirs)}
    return {"result": "ok" if found["ours"] <= FURTHER * found["theirs"] else "further", "reason": "", **found}


def _median(expected: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    return round(float(torch.cat([row_errors(one, other) for one, other in zip(expected, got, strict=True)]).median()), 5)
