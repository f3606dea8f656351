"""Each kernel beside the float32 truth: rows in order and not, slots of nobody, states among NaN, strided operands, 16 bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from paged_attn.attn_ops.batch import packed_ints
from paged_attn.attn_ops.batch.requests import StateCheckpoint
from paged_attn.attn_ops.scans.channels import channel_scan_extend
from paged_attn.attn_ops.scans.kda import kda_extend
from paged_attn.attn_ops.scans.mamba2 import mamba2_extend
from paged_attn.attn_ops.scans.short_conv import short_conv_extend, short_conv_step
from paged_attn.attn_ops.scans.state_rows import Extends, StateRows, Wanted
from tests.attn_ops.scans.problems import RECURRENCES, SLOTS, starts_of

pytest.importorskip("triton")
from paged_attn.backends.scans.triton import conv, prompts, ssd, steps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = {
    "short_conv": conv.step, "gated_delta_rule": steps.gated_delta, "kda": steps.gated_delta, "mamba2_scan": steps.mamba2,
    "mamba1_scan": steps.mamba1, "linear_attention": steps.linear_attention, "linear_attention by channel": steps.linear_attention,
    "linear_attention before": steps.linear_attention, "channel_scan": steps.channels, "channel_scan of maxima": steps.channels,
}  # fmt: skip
PROMPTS = {
    "gated_delta_rule": prompts.gated_delta, "kda": prompts.kda, "mamba2_scan": ssd.mamba2, "mamba1_scan": prompts.mamba1,
    "linear_attention": ssd.linear_attention, "channel_scan": prompts.channels, "channel_scan of maxima": prompts.channels,
}  # fmt: skip
NARROW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no products of bfloat16
CLOSE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def strided(value: Tensor) -> Tensor:
    """The same numbers with other strides."""
    return value.transpose(0, -1).contiguous().transpose(0, -1) if value.dim() > 1 else value


def states_of(name: str, slots: list[int], dtype: torch.dtype, width: int | None = None) -> Tensor:
    shape = RECURRENCES[name].state if width is None else (RECURRENCES[name].state[0], width)
    states = torch.full((SLOTS, *shape), float("nan"), dtype=dtype)
    for slot in slots:
        states[slot] = torch.randn(shape)
    return states.to(DEVICE)


def same(one: Tensor, other: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(one, other, equal_nan=True, **CLOSE[dtype])


@pytest.mark.parametrize(
    "dtype, wide", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("rows", [None, [6, 0, 3, 4]])
@pytest.mark.parametrize("name", STEPS)
def test_decoding_rows(name: str, rows: list[int] | None, dtype: torch.dtype, wide: torch.dtype) -> None:
    torch.manual_seed(5)
    kind, slots = RECURRENCES[name], [5, 2, 0, 8]
    kept = wide if name != "short_conv" else dtype
    states = [states_of(name, [5, 2, 8], kept)]
    states.append(states[0].clone())
    given = [strided(value.to(DEVICE, dtype)) for value in kind.given(7)]
    output = [torch.full((7, *kind.output), 7.0, device=DEVICE, dtype=dtype) for _ in range(2)]
    decode_rows = None if rows is None else torch.tensor(rows, device=DEVICE)
    where = StateRows(decode_rows, torch.tensor(slots, dtype=torch.int32, device=DEVICE), None)
    kind.step(*given, output[0], *kind.options, states[0], where)
    assert STEPS[name](*given, output[1], *kind.options, states[1], where)
    same(output[1], output[0], dtype)
    real = [1, *range(2, SLOTS)]  # what is in slot 0 is nobody's
    same(states[1][real], states[0][real], dtype)


@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_a_convolution_of_three_taps_with_states_of_any_width(width: int) -> None:
    torch.manual_seed(6)
    kind, slots = RECURRENCES["short_conv"], [5, 2, 8]
    states = [states_of("short_conv", slots, torch.float32, width)]
    states.append(states[0].clone())
    x, weight, _ = (value.to(DEVICE) for value in kind.given(3))
    output = [torch.zeros(3, 6, device=DEVICE) for _ in range(2)]
    rows = StateRows(None, torch.tensor(slots, device=DEVICE), None)
    kind.step(x, weight, None, output[0], "", (), states[0], rows)
    assert conv.step(x, weight, None, output[1], "", (), states[1], rows)
    same(output[1], output[0], torch.float32)
    same(states[1], states[0], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 4])
def test_the_convolution_of_prompts(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    kind, lengths, slots, fresh = RECURRENCES["short_conv"], [1, 5, 2, 1, 40], [3, 8, 1, 6, 2], [True, False, False, False, True]
    states = [states_of("short_conv", [8, 1, 6], dtype, width)]
    states.append(states[0].clone())
    x, weight, bias = (strided(value.to(DEVICE, dtype)) for value in kind.given(51))
    output = [torch.full((51, 6), 7.0, device=DEVICE, dtype=dtype) for _ in range(2)]
    extends = Extends([start + 1 for start in starts_of(lengths)], lengths, slots, fresh, x.device)
    kind.extend(x, weight, bias, output[0], "silu", (), states[0], extends)
    assert conv.extend(x, weight, bias, output[1], "silu", (), states[1], extends)
    same(output[1], output[0], dtype)
    same(states[1], states[0], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("strongest", [0.1, 40.0])
def test_kda_of_any_decays(strongest: float, dtype: torch.dtype) -> None:
    """Of a chunk of which exp(-sum) would overflow, too; keys and values in several parts, heads that share queries, a state on the way."""
    torch.manual_seed(12)
    lengths, slots, fresh, heads, width, values = [45, 3, 18], [3, 8, 1], [False, True, False], 2, 40, 72
    rows = sum(lengths)
    query, key = (torch.randn(rows, 1, width).to(DEVICE, dtype) for _ in range(2))
    value, learned = torch.randn(rows, heads, values).to(DEVICE, dtype), torch.rand(rows, heads).to(DEVICE, dtype)
    decay = -(torch.rand(rows, heads, width, device=DEVICE) ** 3) * strongest
    states = [torch.randn(SLOTS, heads, width, values, device=DEVICE)]
    states.append(states[0].clone())
    outputs = [torch.empty_like(value) for _ in range(2)]
    extends = Extends(starts_of(lengths), lengths, slots, fresh, value.device, {0: [StateCheckpoint(38, 5)]})
    assert prompts.kda(query, key, value, decay, learned, outputs[0], True, states[0], extends)
    kda_extend(query, key, value, decay, learned, outputs[1], True, states[1], extends)
    for ours, truth in zip((outputs[0], states[0]), (outputs[1], states[1]), strict=True):
        assert float((ours.float() - truth.float()).norm() / truth.float().norm()) < (
            1e-5 if dtype == torch.float32 else 6e-3 if dtype == torch.bfloat16 else 3e-3
        )


@pytest.fixture(autouse=True)
def narrow_products_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 stands for bfloat16 there."""
    if DEVICE == "cpu":
        monkeypatch.setattr(ssd, "TOO_SMALL", ())


def test_a_state_beyond_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model in float16 the state is in float32, and what a prompt reads of it, too."""
    monkeypatch.undo()
    torch.manual_seed(0)
    rows, lengths = 130, [130]
    x, step = (torch.rand(rows, 1, 16) * 400).to(DEVICE, torch.float16), torch.ones(rows, 1, device=DEVICE, dtype=torch.float16)
    b, c = ((torch.rand(rows, 1, 16) * size).to(DEVICE, torch.float16) for size in (10, 1e-3))
    states, outputs = [torch.zeros(SLOTS, 1, 16, 16, device=DEVICE) for _ in range(2)], [torch.empty_like(x) for _ in range(2)]
    rates, extends = torch.tensor([-1e-4], device=DEVICE), Extends([0], lengths, [1], [True], x.device)
    assert ssd.mamba2(x, step, rates, b, c, outputs[0], 0.0, float("inf"), states[0], extends)
    mamba2_extend(x, step, rates, b, c, outputs[1], 0.0, float("inf"), states[1], extends)
    assert float(states[0].max()) > torch.finfo(torch.float16).max and bool(outputs[1].isfinite().all())
    same(outputs[0], outputs[1], torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("heads, width, state, groups", [(6, 40, 72, 3), (4, 16, 272, 1)])
def test_states_of_mamba2_in_several_parts(heads: int, width: int, state: int, groups: int, dtype: torch.dtype) -> None:
    """Which several programs hold, and which are multiplied part after part."""
    torch.manual_seed(11)
    lengths, slots, fresh = [70, 2, 33], [3, 8, 1], [False, True, False]
    rows = sum(lengths)
    x, step = torch.randn(rows, heads, width).to(DEVICE, dtype), torch.rand(rows, heads).to(DEVICE, dtype)
    b, c = (torch.randn(rows, groups, state).to(DEVICE, dtype) / state**0.5 for _ in range(2))
    rates = -torch.rand(heads, device=DEVICE)
    states = [torch.randn(SLOTS, heads, width, state, device=DEVICE)]
    states.append(states[0].clone())
    outputs = [torch.empty_like(x) for _ in range(2)]
    extends = Extends(starts_of(lengths), lengths, slots, fresh, x.device, {0: [StateCheckpoint(40, 5)]})
    assert ssd.mamba2(x, step, rates, b, c, outputs[0], 0.0, float("inf"), states[0], extends)
    mamba2_extend(x, step, rates, b, c, outputs[1], 0.0, float("inf"), states[1], extends)
    for ours, truth in zip((outputs[0], states[0]), (outputs[1], states[1]), strict=True):
        limit = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}[dtype]
        assert float((ours.float() - truth.float()).norm() / truth.float().norm()) < limit


@pytest.mark.parametrize("first", [0, 8])
def test_a_convolution_of_columns_of_something_wider(first: int) -> None:
    """Bitwise what it gives for a copy of them: queries, keys and values of each of three groups, and columns that lie together."""
    torch.manual_seed(10)
    columns = [0, 3, 20, 4, 4, 3, 20, 4, 8, 3, 20, 6, 61, 1, 0, 5]
    wide = torch.randn(51, 80, device=DEVICE)[:, first : first + 70]
    channels = [[start + group * apart + i for group in range(groups) for i in range(width)]
                for start, groups, apart, width in zip(*(columns[i::4] for i in range(4)), strict=True)]  # fmt: skip
    copied = wide[:, list(itertools.chain(*channels))].contiguous()
    count = copied.shape[1]
    weight, bias = torch.randn(count, 3, device=DEVICE), torch.randn(count, device=DEVICE)
    lengths, slots, fresh = [1, 5, 2, 40], [3, 8, 1, 6], [True, False, False, True]
    extends = Extends(starts_of(lengths), lengths, slots, fresh, wide.device)
    rows = StateRows(None, torch.tensor([3, 6, 8], device=DEVICE), None)
    runs = [(conv.extend, conv.step, copied, ()), (conv.extend, conv.step, wide, columns),
            (short_conv_extend, short_conv_step, copied, ()), (short_conv_extend, short_conv_step, wide, columns)]  # fmt: skip
    found = []
    states = torch.randn(SLOTS, count, 4, device=DEVICE)
    for extend, step, x, where in runs:
        own, outputs = states.clone(), [torch.zeros(51, count, device=DEVICE) for _ in range(2)]
        extend(x, weight, bias, outputs[0], "silu", where, own, extends)
        step(x, weight, bias, outputs[1], "silu", where, own, rows)
        found.append((*outputs, own[1:]))
    for one, other in ((0, 1), (2, 3)):
        assert all(torch.equal(a, b) for a, b in zip(found[one], found[other], strict=True))
    for ours, truth in zip(found[1], found[3], strict=True):
        same(ours, truth, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str, dtype: torch.dtype) -> None:
    """Of several chunks, one whole chunk, single tokens, on fresh states and on others, between rows that are not theirs."""
    torch.manual_seed(8)
    kind, lengths, slots, fresh = RECURRENCES[name], [1, 70, 2, 1, 64, 33], [3, 8, 1, 6, 2, 4], [True, False, False, False, True, True]
    states = [states_of(name, [8, 1, 6], torch.float32)]
    states.append(states[0].clone())
    given = [strided(value.to(DEVICE, dtype)) for value in kind.given(sum(lengths) + 3)]
    output = [torch.full((sum(lengths) + 3, *kind.output), 7.0, device=DEVICE, dtype=dtype) for _ in range(2)]
    extends = Extends([start + 1 for start in starts_of(lengths)], lengths, slots, fresh, given[0].device)
    kind.extend(*given, output[0], *kind.options, *kind.limits, states[0], extends)
    assert PROMPTS[name](*given, output[1], *kind.options, *kind.limits, states[1], extends)
    same(output[1], output[0], dtype)
    same(states[1], states[0], dtype)
    assert (output[1][0] == 7).all() and (output[1][-2:] == 7).all(), "rows that are nobody's are not written"


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("name", ["short_conv", *PROMPTS])
def test_states_on_the_way(name: str, dtype: torch.dtype) -> None:
    """Beside the truth; and bitwise those of steps that end there."""
    torch.manual_seed(9)
    kind, lengths, slots, fresh = RECURRENCES[name], [40, 6, 20, 3], [3, 8, 1, 5], [True, False, False, False]
    kept = {0: [(33, 2)], 2: [(1, 4), (2, 6), (17, 7)]}
    checkpoints = {request: [StateCheckpoint(*each) for each in some] for request, some in kept.items()}
    states = [states_of(name, [8, 1, 5], dtype)]
    states += [states[0].clone(), states[0].clone()]
    given = [strided(value.to(DEVICE, dtype)) for value in kind.given(sum(lengths))]
    outputs = [torch.full((sum(lengths), *kind.output), 7.0, device=DEVICE, dtype=dtype) for _ in states]
    starts, device = starts_of(lengths), given[0].device
    extends = Extends(starts, lengths, slots, fresh, device, checkpoints)
    run, options = (conv.extend if name == "short_conv" else PROMPTS[name]), (*kind.options, *kind.limits)
    kind.extend(*given, outputs[0], *options, states[0], extends)
    assert run(*given, outputs[1], *options, states[1], extends)
    same(outputs[1], outputs[0], dtype)
    same(states[1], states[0], dtype)
    for request, (start, length, slot) in enumerate(zip(starts, lengths, slots, strict=True)):
        before = 0
        for end, target in (*kept.get(request, []), (length, slot)):
            step = Extends([start + before], [end - before], [slot], [fresh[request] and not before], device)
            assert run(*given, outputs[2], *options, states[2], step)
            states[2][target] = states[2][slot]
            before = end
    assert torch.equal(states[1][1:], states[2][1:]) and torch.equal(outputs[1], outputs[2])
    assert states[1][0].isnan().all(), "nobody's slot"


@pytest.mark.parametrize("name", ["short_conv", *PROMPTS])
def test_a_second_step_finds_all_its_tables_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, run = RECURRENCES[name], conv.extend if name == "short_conv" else PROMPTS[name]
    wanted: Wanted = {}
    given, states = [value.to(DEVICE) for value in kind.given(5)], states_of(name, [1], torch.float32)
    for module in (conv, prompts, ssd):
        monkeypatch.setattr(module, "keyed_launch", lambda *_, **__: None)
    for step in range(2):
        extends = Extends([0], [5], [1], [False], given[0].device, wanted=wanted)
        extends.place([])
        if step:
            monkeypatch.setattr(packed_ints, "copy_to_device", lambda *_: pytest.fail("a table is copied while layers run"))
        assert run(*given, given[0], *kind.options, *kind.limits, states, extends)


@pytest.mark.parametrize("maximum", [False, True])
def test_fresh_scans_of_channels_start_from_a_number(maximum: bool) -> None:
    torch.manual_seed(3)
    decay, x = (torch.rand(75, 70, device=DEVICE) - 0.5 for _ in range(2))
    states, outputs = [torch.full((SLOTS, 70), 3.0, device=DEVICE) for _ in range(2)], [torch.empty_like(x) for _ in range(2)]
    extends = Extends([0, 70], [70, 5], [3, 1], [True, True], x.device, {0: [StateCheckpoint(38, 5)]})
    channel_scan_extend(decay, x, outputs[0], maximum, -1e38, states[0], extends)
    assert prompts.channels(decay, x, outputs[1], maximum, -1e38, states[1], extends)
    assert bool((outputs[1][[0, 70]] == torch.tensor(-1e38)).all())
    same(outputs[1], outputs[0], torch.float32)
    same(states[1], states[0], torch.float32)


def test_what_a_program_does_not_hold_is_left_alone() -> None:
    rows = StateRows(None, torch.tensor([1]), None)
    q, v, g = torch.randn(1, 1, 300), torch.randn(1, 1, 2), torch.zeros(1, 1)
    output = torch.full((1, 1, 2), 7.0)
    assert not steps.gated_delta(q, q, v, g, g, output, False, torch.zeros(2, 1, 300, 2), rows) and (output == 7).all()
