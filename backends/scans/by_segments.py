"""For kernels that go from a state per sequence to the state after it: prompts whose states are kept on the way, segment after segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paged_attn.attn_ops.scans.state_rows import Extends, Wave

# Rows of each given tensor, the wave, and the states [N, ...] before its segments -> output rows, and the states after them.
Sequences = Callable[[Sequence[Tensor], Wave, Tensor], tuple[Tensor, Tensor]]


def run_by_segments(given: Sequence[Tensor], output: Tensor, states: Tensor, extends: Extends, run: Sequences) -> None:
    """`run` for the first segments of all requests, then for the second ones, and so on; mostly there is one.

    A segment starts from what the dtype of `states` has made of the state before it, as whoever starts there does.
    """
    now = extends.before(states)
    for wave in extends.waves:
        result, after = run([each[wave.rows] for each in given], wave, now[wave.owners])
        output[wave.rows] = result.to(output.dtype)
        now[wave.owners] = states[wave.targets] = after.to(states.dtype)
