"""One step through a backend and through the oracle."""

from __future__ import annotations

import torch

from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.reference import ReferenceBackend
from tests.backends.problems import TOLERANCE, Case, bits, close, copy_of, run

REFERENCE = ReferenceBackend()


def agree(case: Case, backend: AttentionBackend, *, lse: bool = False, save: bool = True, lse_tolerance: float | None = None) -> None:
    """The oracle's numbers, zeros in padded rows, and the same bits in the pool, so that nothing else was written there.

    `lse_tolerance` is for log-sum-exps that are exact in float32 although the rows are not; by default the dtype's.
    """
    dtype, count, theirs = case.query.dtype, case.batch.num_tokens, copy_of(case)
    expected, expected_lse = run(theirs, REFERENCE, lse=lse, save=save)
    output, lse_out = run(case, backend, lse=lse, save=save)
    assert not output.isnan().any() and not output[count:].any()
    close(output, expected, dtype)
    assert torch.equal(bits(case.pool.storage), bits(theirs.pool.storage))
    if lse:
        assert lse_out is not None and not lse_out[count:].any()
        tolerance = TOLERANCE[dtype] if lse_tolerance is None else lse_tolerance
        torch.testing.assert_close(lse_out, expected_lse, atol=tolerance, rtol=tolerance)
