"""`torch.ops.paged_attn.gated_delta_rule_with_output` and `kda_with_output`: linear attention whose state decays and is corrected, token by
token; all of a head's state by one decay, or each channel of its keys by one of its own (Kimi delta attention)."""

from __future__ import annotations

from torch import Tensor

from paged_attn.attn_ops.ops.define import define_op
from paged_attn.attn_ops.ops.scans.kernels import run_scan
from paged_attn.attn_ops.scans.gated_delta import gated_delta_extend, gated_delta_step
from paged_attn.attn_ops.scans.kda import kda_extend


def _run(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, layer_id: int, state_id: int
) -> None:
    """query, key [T, key heads, K]; value, output [T, H, V]; g (logarithms of decays), beta [T, H]; the state is [H, K, V].

    `normalise`: queries and keys are divided by their lengths first. Rows past the batch's real tokens are zeroed.
    """
    given = (query, key, value, g, beta, output, normalise)
    run_scan("gated_delta_rule", layer_id, state_id, gated_delta_extend, gated_delta_step, given, output)


def _run_by_channel(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, layer_id: int, state_id: int
) -> None:
    """As `_run`, with g [T, H, K]."""
    run_scan("kda", layer_id, state_id, kda_extend, gated_delta_step, (query, key, value, g, beta, output, normalise), output)


_SCHEMA = (
    "_with_output(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor(a!) output, bool normalise, int layer_id, "
    "int state_id) -> ()"
)
GATED_DELTA_RULE = define_op("gated_delta_rule" + _SCHEMA, _run)
KDA = define_op("kda" + _SCHEMA, _run_by_channel)
