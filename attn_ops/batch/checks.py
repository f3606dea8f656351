"""What a batch is refused for, in words; `Batch.build` finds out that something is wrong for all requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from paged_attn.attn_ops.batch.requests import BatchRequest
from paged_attn.attn_ops.batch.step_buffers import StepShape
from paged_attn.attn_ops.errors import UnsupportedError


def refuse(requests: Sequence[BatchRequest], page_size: int) -> NoReturn:
    """Raises ValueError for the first request that no batch may hold."""
    for index, request in enumerate(requests):
        _check(index, request, page_size)
    raise AssertionError("a batch was refused whose requests are all right")


def refuse_extensions(requests: Sequence[BatchRequest], shape: StepShape) -> NoReturn:
    """Raises ValueError for the first request that is no decode step with one logit."""
    for index, request in enumerate(requests):
        if len(request.tokens) != 1 or request.num_cached < 1 or request.num_logits != 1:
            raise ValueError(
                f"request {index} has {len(request.tokens)} new tokens after {request.num_cached} cached ones and wants "
                f"{request.num_logits} logits, but {shape} takes decode steps: one new token after cached ones, and its logits; "
                "give a shape without `requests`"
            )
    raise AssertionError("a batch was refused whose requests all decode")


def _check(index: int, request: BatchRequest, page_size: int) -> None:
    count = len(request.tokens)
    if request.num_cached < 0:
        raise ValueError(f"request {index} has num_cached={request.num_cached}; allowed are 0 and above")
    need = -(-(request.num_cached + count) // page_size)
    if count < 1:
        raise ValueError(f"request {index} of the batch has no new token; leave it out of this step")
    if len(request.pages) < need:
        raise UnsupportedError(
            f"request {index} has {len(request.pages)} pages of {page_size} tokens, but {request.num_cached} cached + "
            f"{count} new tokens need {need}; allocate {need - len(request.pages)} more"
        )
    if (lowest := min(request.pages[:need])) < 1:
        raise ValueError(f"request {index} lists page {lowest}; page 0 is reserved for padding, so take pages from a PageAllocator")
    if request.length and request.length < request.num_cached + count:
        raise ValueError(
            f"request {index} has length={request.length}; allowed are 0 and {request.num_cached + count} and above, as it has "
            f"{request.num_cached} cached and {count} new tokens in this step"
        )
    if not 0 <= request.num_logits <= count:
        raise ValueError(f"request {index} wants {request.num_logits} logits of {count} new tokens; allowed are 0 to {count}")
