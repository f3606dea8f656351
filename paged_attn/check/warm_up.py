"""The first run of compiled pieces, on many rows.

Inductor's kernels choose among their configurations when they first run. The few rows of a check would choose for the
thousands of a prompt, at which another configuration is up to 1.4 times as fast.
"""

from __future__ import annotations

import torch

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.calling.no_attention import without_attention
from paged_attn.check.runs.served import Served, must_run
from paged_attn.check.runs.tapped import unchanged
from paged_attn.stopwatch import part

ROWS = 2048


@part("first run of the pieces")
def warm_up(served: Served, device: torch.device, longest: int | None) -> None:
    """Run all that lies between the ops that mix tokens on ROWS rows, of as many requests as that takes.

    Args:
        longest: how many positions the model has.
    """
    page_size = min(ROWS, longest or ROWS)
    batch = Batch.build([BatchRequest([0] * page_size, [1])] * (ROWS // page_size), page_size, device)
    with without_attention(batch, served.kv_dtype), must_run("the compiled graph", f"{ROWS} rows"):
        served.run_pieces(batch, unchanged)
