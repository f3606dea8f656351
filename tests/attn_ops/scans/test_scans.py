"""Each recurrence on packed requests is what it is token by token: across chunks, from states, in steps, with garbage where nobody is."""

from __future__ import annotations

import pytest
import torch

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, StateCheckpoint
from paged_attn.attn_ops.batch.step_buffers import StepBuffers, StepShape
from paged_attn.attn_ops.scans.chunks import Chunks
from paged_attn.attn_ops.scans.state_rows import Extends, StateRows
from paged_attn.attn_ops.scans.state_segments import ChunkBounds, StateSegments
from tests.attn_ops.scans.problems import RECURRENCES, SLOTS, starts_of

CPU = torch.device("cpu")
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def states_among_nan(name: str, slots: tuple[int, ...]) -> torch.Tensor:
    states = torch.full((SLOTS, *RECURRENCES[name].state), float("nan"))
    for slot in slots:
        states[slot] = torch.randn(states.shape[1:])
    return states


@pytest.mark.parametrize("lengths", [(1,), (64,), (65, 1), (3, 130, 1, 64, 31, 32, 33)])
@pytest.mark.parametrize("name", RECURRENCES)
def test_ragged_prompts(name: str, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(len(lengths))
    kind = RECURRENCES[name]
    slots, fresh = [8, 3, 5, 1, 7, 2, 4][: len(lengths)], [i % 3 == 0 for i in range(len(lengths))]
    states = states_among_nan(name, tuple(slot for slot, new in zip(slots, fresh, strict=True) if not new))
    before, total = states.clone(), sum(lengths)
    given = kind.given(total + 3)
    output = torch.full((total + 3, *kind.output), 7.0)
    kind.extend(*given, output, *kind.options, *kind.limits, states, Extends(starts_of(lengths), lengths, slots, fresh, CPU))
    assert (output[total:] == 7).all(), "rows of nobody"
    for start, length, slot, new in zip(starts_of(lengths), lengths, slots, fresh, strict=True):
        state = torch.zeros(kind.state) if new else before[slot]
        expected, after = kind.expected(given, state, range(start, start + length), decodes=False)
        torch.testing.assert_close(output[start : start + length].double(), expected, **CLOSE)
        torch.testing.assert_close(states[slot].double(), after, **CLOSE)
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert states[others].isnan().all(), "slots of nobody"


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("name", RECURRENCES)
def test_decoding_rows(name: str, in_order: bool) -> None:
    torch.manual_seed(3)
    kind = RECURRENCES[name]
    slots, rows = [5, 2, 0, 8], [0, 1, 2, 3] if in_order else [6, 0, 3, 4]
    states = states_among_nan(name, (5, 2, 8))
    before, given, output = states.clone(), kind.given(7), torch.full((7, *kind.output), 7.0)
    where = None if in_order else torch.tensor(rows)
    kind.step(*given, output, *kind.options, states, StateRows(where, torch.tensor(slots, dtype=torch.int32), None))
    for row, slot in zip(rows, slots, strict=True):
        if not slot:
            assert not output[row].any(), "a row of nobody"
            continue
        expected, after = kind.expected(given, before[slot], [row], decodes=True)
        torch.testing.assert_close(output[row].double(), expected[0], **CLOSE)
        torch.testing.assert_close(states[slot].double(), after, **CLOSE)
    assert (output[[row for row in range(7) if row not in rows]] == 7).all()


@pytest.mark.parametrize("name", RECURRENCES)
def test_in_parts_it_is_the_same(name: str) -> None:
    torch.manual_seed(4)
    kind = RECURRENCES[name]
    given, whole, parts = kind.given(90), torch.zeros(90, *kind.output), torch.zeros(90, *kind.output)
    states = [states_among_nan(name, ()) for _ in range(2)]
    kind.extend(*given, whole, *kind.options, *kind.limits, states[0], Extends([0], [90], [1], [True], CPU))
    for start, end in ((0, 2), (2, 3), (3, 68), (68, 90)):
        extends = Extends([start], [end - start], [1], [not start], CPU)
        kind.extend(*given, parts, *kind.options, *kind.limits, states[1], extends)
    torch.testing.assert_close(parts, whole, **CLOSE)
    torch.testing.assert_close(states[1][1], states[0][1], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECURRENCES)
def test_states_on_the_way_are_bitwise_those_of_steps_that_end_there(name: str, dtype: torch.dtype) -> None:
    """A fresh request, one with many checkpoints (also one token after its start and after another), one without, all side by side."""
    torch.manual_seed(11)
    kind, lengths, slots, fresh = RECURRENCES[name], [70, 140, 9], [3, 1, 5], [True, False, False]
    kept = {0: [(64, 2)], 1: [(1, 4), (2, 6), (100, 7), (139, 8)]}
    checkpoints = {request: [StateCheckpoint(*each) for each in some] for request, some in kept.items()}
    states = [states_among_nan(name, (1, 5)).to(dtype)]
    states.append(states[0].clone())
    given = kind.given(sum(lengths))
    outputs = [torch.full((sum(lengths), *kind.output), 7.0) for _ in states]
    extends = Extends(starts_of(lengths), lengths, slots, fresh, CPU, checkpoints)
    kind.extend(*given, outputs[0], *kind.options, *kind.limits, states[0], extends)
    for request, (start, length, slot) in enumerate(zip(starts_of(lengths), lengths, slots, strict=True)):
        before = 0
        for end, target in (*kept.get(request, []), (length, slot)):
            step = Extends([start + before], [end - before], [slot], [fresh[request] and not before], CPU)
            kind.extend(*given, outputs[1], *kind.options, *kind.limits, states[1], step)
            states[1][target] = states[1][slot]
            before = end
    assert torch.equal(states[0][1:], states[1][1:])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)  # silu rounds by where a number lies
    assert states[0][0].isnan().all(), "nobody's slot"


def test_segments_and_their_chunks() -> None:
    segments = StateSegments.of([5, 0, 8], [3, 5, 4], [7, 8, 9], {1: [StateCheckpoint(1, 2), StateCheckpoint(4, 3)]})
    assert [each.tolist() for each in segments] == [[5, 0, 1, 4, 8], [3, 1, 3, 1, 4], [0, 1, 1, 1, 2], [7, 2, 3, 8, 9]]
    bounds = ChunkBounds.of(segments, 2)
    assert bounds.rows.tolist() == [5, 7, 0, 1, 3, 4, 8, 10] and bounds.counts.tolist() == [2, 1, 1, 2, 1, 1, 2, 2]
    assert bounds.ends.tolist() == [-1, 0, 1, -1, 2, 3, -1, 4] and bounds.requests.tolist() == [[0, 2, 6], [2, 4, 2]]
    chunks = Chunks.of(segments, 2, CPU)
    assert [wave.tolist() for wave in chunks.waves] == [[2, 0, 6], [3, 1, 7], [4], [5]]
    ends = [tuple(each.tolist() for each in wave) for wave in chunks.ends]
    assert ends == [([0], [1]), ([1, 2], [0, 4]), ([0], [2]), ([0], [3])]


def test_chunks_of_ragged_requests() -> None:
    chunks = Chunks.of(StateSegments.of([5, 0], [3, 5], [1, 2], {}), 2, CPU)
    assert chunks.rows.tolist() == [[5, 6], [7, 0], [0, 1], [2, 3], [4, 0]]
    assert chunks.real.tolist() == [[True, True], [True, False], [True, True], [True, True], [True, False]]
    assert chunks.order.tolist() == [1, 0] and [wave.tolist() for wave in chunks.waves] == [[2, 0], [3, 1], [4]]


def test_rows_of_a_mixed_batch() -> None:
    kept = [StateCheckpoint(1, 4)]
    requests = [
        BatchRequest([1], [1], 4, state_slot=3), BatchRequest([5], [3], state_slot=6),
        BatchRequest([1, 2], [2], 1, state_slot=1, checkpoints=kept),
    ]  # fmt: skip
    rows = StateRows.of(Batch.build([*requests, BatchRequest([1], [4], 1, state_slot=2)], 8))
    assert rows.decode_rows is not None and rows.decode_rows.tolist() == [0, 4] and rows.decode_slots.tolist() == [3, 2]
    extends = rows.extends
    assert extends is not None and (extends.starts, extends.lengths) == ([1, 2], [1, 2])
    assert (extends.slots, extends.fresh, extends.checkpoints) == ([6, 1], [True, False], {1: kept})


def test_a_step_of_a_graph_reads_its_slots_where_they_always_lie() -> None:
    buffers, addresses = StepBuffers(8, 8, 4, 4, CPU), set()
    for slots in ((3,), (2, 7, 1)):
        requests = [BatchRequest([1], [page], 2, state_slot=slot) for page, slot in enumerate(slots, 1)]
        batch = Batch.build(requests, 4, shape=StepShape(4, 4, 4), buffers=buffers)
        rows = StateRows.of(batch)
        assert rows.extends is None and rows.decode_rows is None and rows.num_decode == 4
        assert rows.decode_slots.tolist() == [*slots, *[0] * (4 - len(slots))]
        addresses.add(rows.decode_slots.data_ptr())
    assert len(addresses) == 1


def test_channels_that_forget_at_once_beside_channels_that_keep_everything() -> None:
    """exp(-G) of such sums is beyond float32: what is left between two tokens is taken from their difference."""
    torch.manual_seed(9)
    kind = RECURRENCES["kda"]
    given = kind.given(130)
    given[3] = torch.where(torch.rand(130, 4, 8) < 0.5, -40.0, -1e-4)
    output, states = torch.zeros(130, *kind.output), states_among_nan("kda", (1,))
    before = states[1].clone()
    kind.extend(*given, output, *kind.options, states, Extends([0], [130], [1], [False], CPU))
    expected, after = kind.expected(given, before, range(130), decodes=False)
    torch.testing.assert_close(output.double(), expected, **CLOSE)
    torch.testing.assert_close(states[1].double(), after, **CLOSE)
