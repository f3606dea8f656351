"""Every backend that runs on this GPU, on every feature, page layout, page size and dtype that it claims, against the oracle on the CPU.

Unused pages, unused slots of used pages, padded rows and what lies between strided elements hold NaN. Backends that compile for long on
first use carry the marker `jit`, and the rarer of their kernels `slow` besides: `-m "not jit"` and `-m "not slow"` leave them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.specs.attention import AttentionSpec
from tests.backends.attention.test_property import Axes, agree, agreeing_backends, cases, expected_of
from tests.backends.fitting import JIT, instance, problem_of, reasons_against, usable_names
from tests.backends.problems import FEATURES, LAYER, LAYOUTS, STRIDES, Case, make, spec_of

CUDA = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = {
    "decode": ((1, 1), (15, 1), (16, 1), (70, 1)),
    "extend": ((0, 7), (0, 1), (0, 18), (9, 4)),
    "mixed": ((17, 1), (0, 1), (6, 5), (70, 1), (0, 9)),
}
SHARED = ((70, 1), (65, 3), (64, 1))  # at least a page of 64 in common
LONG = {"decode": ((2100, 1), (3, 1), (700, 1)), "extend": ((600, 5), (0, 140)), "mixed": ((1500, 1), (300, 70), (64, 1))}
LONGER = {"extend": ((2100, 200), (300, 70)), "mixed": ((2500, 1), (2000, 70), (64, 1))}
HOPPER_STEPS = {64: LONG, 128: LONGER}  # by the keys in a block of the kernel for Hopper, unless it has 64 for all
HOPPER_FEATURES = ("plain", "window", "softcap", "sinks", "chunk", "window_chunk", "bidirectional", "bidirectional_window",
                   "bidirectional_chunk", "gqa_7_sinks", "all")  # fmt: skip
HOPPER_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
HOPPER_CASES = [(dims, feature) for dims in HOPPER_DIMS for feature in HOPPER_FEATURES]
HOPPER_CASES += [((dim, dim), feature) for dim in (80, 96, 144, 160, 192) for feature in ("plain", "all")]
HOPPER_CASES += [((qk, v), "plain") for qk, v in ((96, 64), (160, 128))]
WIDE = {"sliding_window": 300, "chunk": 200}  # instead of those of FEATURES, which are smaller than any block
DIMS = ((16, 16), (80, 80), (96, 96), (128, 128), (192, 128), (64, 128), (192, 192), (256, 256))
PAGE_SIZES = (1, 16, 64, 128, 256)
JIT_FEATURES = ("plain", "window", "mha")  # of backends marked jit; other features are slow
NAMES = usable_names("cuda")


def _marks(name: str, slow: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.jit] * (name in JIT) + [pytest.mark.slow] * (name in JIT and slow)


def runs(*axes: tuple[Any, ...], slow: Callable[..., bool] = lambda *values: False) -> list[Any]:
    """A test parameter set per backend and value, marked; those of no backend, which are skipped, where there is no GPU."""
    return [
        pytest.param(name, *values, marks=_marks(name, slow(*values)), id="-".join(map(_word, (name, *values))))
        for name in NAMES or ["none"]
        for values in axes
    ]


def _word(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")


@cache
def case_and_expected(
    spec: AttentionSpec, lengths: tuple[tuple[int, int], ...], page_size: int, dtype: torch.dtype, layout: str, strides: str, lse: bool
) -> tuple[Case, torch.Tensor, torch.Tensor | None]:
    case = make(lengths, spec, page_size=page_size, dtype=dtype, layout=layout, strides=strides, extra_rows=3)
    expected, expected_lse = expected_of(case, lse)
    return case, expected, expected_lse


def check(
    name: str,
    spec: AttentionSpec,
    lengths: tuple[tuple[int, int], ...],
    *,
    page_size: int = 0,
    dtype: torch.dtype = BF16,
    layout: str = "shuffled",
    strides: str = "contiguous",
    lse: bool = False,
) -> None:
    """Skips with the backend's own reasons; page size 0 means the first one that the backend has."""
    for size in (page_size,) if page_size else (16, 256):
        case, expected, expected_lse = case_and_expected(spec, lengths, size, dtype, layout, strides, lse)
        if not (reasons := reasons_against(name, problem_of(case, CUDA, lse=lse))):
            agree(name, case.to(CUDA), expected, expected_lse, strides)
            return
    pytest.skip("; ".join(reasons))


@pytest.mark.parametrize(
    ("name", "feature", "step"), runs(*((f, s) for f in FEATURES for s in STEPS), slow=lambda f, s: f not in JIT_FEATURES)
)
def test_every_feature_in_every_step(name: str, feature: str, step: str) -> None:
    check(name, spec_of(feature, dim=64), STEPS[step])


@pytest.mark.parametrize(
    ("name", "feature", "step"),
    runs(*((f, s) for f in ("plain", "window", "sinks", "softcap", "alibi", "all") for s in ("decode", "mixed")),
         slow=lambda f, s: f not in JIT_FEATURES),
)  # fmt: skip
def test_log_sum_exp(name: str, feature: str, step: str) -> None:
    check(name, spec_of(feature, dim=64), STEPS[step], lse=True)


@pytest.mark.parametrize(
    ("name", "dtype", "feature", "step"),
    runs(*((d, f, s) for d in (FP16, FP32) for f in ("plain", "all") for s in ("decode", "mixed")), slow=lambda *_: True),
)
def test_other_dtypes(name: str, dtype: torch.dtype, feature: str, step: str) -> None:
    check(name, spec_of(feature, dim=64), STEPS[step], dtype=dtype)


@pytest.mark.parametrize(("name", "page_size", "layout"), runs(*((p, layout) for p in PAGE_SIZES for layout in LAYOUTS)))
def test_page_layouts_and_sizes(name: str, page_size: int, layout: str) -> None:
    check(name, spec_of(dim=64), SHARED if layout == "shared" else STEPS["mixed"], page_size=page_size, layout=layout)
    decode = tuple((cached + new - 1, 1) for cached, new in (SHARED if layout == "shared" else STEPS["decode"]))
    check(name, spec_of(dim=64), decode, page_size=page_size, layout=layout)


@pytest.mark.parametrize(("name", "page_size"), runs(*((p,) for p in PAGE_SIZES[1:])))
@pytest.mark.parametrize("new", [1, 2])
def test_lengths_around_page_edges(name: str, page_size: int, new: int) -> None:
    ends = [edge + d for edge in (page_size, 2 * page_size) for d in (-1, 0, 1)]
    check(name, spec_of(dim=64), tuple((end - new, new) for end in ends), page_size=page_size)


@pytest.mark.parametrize(("name", "dims", "step"), runs(*((d, s) for d in DIMS for s in ("decode", "extend")), slow=lambda *_: True))
def test_head_dims(name: str, dims: tuple[int, int], step: str) -> None:
    check(name, dataclasses.replace(spec_of(dim=dims[0]), v_head_dim=dims[1]), STEPS[step])


@pytest.mark.parametrize(("name", "step"), runs(*((s,) for s in LONG)))
@pytest.mark.parametrize("feature", ["plain", "window"])
def test_long_contexts_that_are_split(name: str, step: str, feature: str) -> None:
    spec = spec_of(feature, dim=64)
    check(name, dataclasses.replace(spec, sliding_window=900) if feature == "window" else spec, LONG[step])


@pytest.mark.parametrize("keys", HOPPER_STEPS)
@pytest.mark.parametrize(("dims", "feature"), HOPPER_CASES, ids=lambda value: _word(value))
def test_every_feature_in_the_kernel_for_hopper(feature: str, dims: tuple[int, int], keys: int) -> None:
    if "triton" not in NAMES or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Triton on a GPU of compute capability 9.0")
    narrow = spec_of(feature, dim=dims[0])
    wide = {name: width for name, width in WIDE.items() if getattr(narrow, name) is not None}
    wide |= {"sliding_window": 150} if len(wide) == 2 else {}
    spec = dataclasses.replace(narrow, v_head_dim=dims[1], alibi_slopes=None, **wide)
    for step in ("extend", "mixed"):
        lengths = HOPPER_STEPS[keys][step]
        for page_size, dtype in ((16, BF16), (1, BF16), (64, FP16)) if feature == "plain" else ((16, BF16),):
            case, *_ = case_and_expected(spec, lengths, page_size, dtype, "shuffled", "contiguous", True)
            assert hopper_blocks(case.to(CUDA)) == [keys if dims[1] <= 128 else 64]
            check("triton", spec, lengths, lse=True, page_size=page_size, dtype=dtype)


@pytest.mark.parametrize("feature", ["plain", "window_chunk", "sinks", "all"])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)
def test_waves_of_the_kernel_for_hopper(feature: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if "triton" not in NAMES or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Triton on a GPU of compute capability 9.0")
    monkeypatch.setattr("paged_attn.backends.attention.triton.tiling._waves", lambda *_: 3)
    spec = dataclasses.replace(spec_of(feature, dim=dims[0]), v_head_dim=dims[1], alibi_slopes=None)
    case, *_ = case_and_expected(spec, LONGER["mixed"], 16, BF16, "shuffled", "contiguous", True)
    case = case.to(CUDA)
    more = [share for share in instance("triton").plan(case.batch, case.pool).shares if share.kind.tiling.hopper]
    assert more and all(share.programs == 3 * torch.cuda.get_device_properties(0).multi_processor_count for share in more)
    check("triton", spec, LONGER["mixed"], lse=True)


def hopper_blocks(case: Case) -> list[int]:
    """Keys in a block of each launch of the kernel for Hopper that the Triton backend plans for the case."""
    plan = instance("triton").plan(case.batch, case.pool)
    tilings = [plan.shares[index].kind.tiling for index in plan.by_layer[LAYER]["intra"]]
    return [tiling.block_n for tiling in tilings if tiling.hopper]


@pytest.mark.parametrize(("name", "strides", "step"), runs(*((s, step) for s in STRIDES for step in ("decode", "mixed"))))
def test_odd_strides_of_operands_and_output(name: str, strides: str, step: str) -> None:
    check(name, spec_of(dim=64), STEPS[step], strides=strides)


@pytest.mark.parametrize(("name", "heads"), runs(((1, 1),), ((8, 8),), ((32, 8),), ((16, 1),), ((40, 2),), slow=lambda h: h != (32, 8)))
def test_group_sizes(name: str, heads: tuple[int, int]) -> None:
    spec = dataclasses.replace(spec_of(dim=64), num_q_heads=heads[0], num_kv_heads=heads[1])
    check(name, spec, STEPS["decode"])
    check(name, spec, STEPS["mixed"])


GPU_AXES = Axes(
    heads=((4, 2), (8, 2), (7, 1)), dims=((64, 64), (64, 32)), page_sizes=(1, 16, 64), dtypes=(BF16,), longest=150
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(GPU_AXES), lse=st.booleans(), strides=st.sampled_from(STRIDES))
def test_every_backend_that_fits_gives_the_references_numbers(case: Case, lse: bool, strides: str) -> None:
    """Without those that would compile anew for many of the problems."""
    assert agreeing_backends(case, CUDA, lse, strides, left_out=JIT)


def test_there_is_a_backend_of_ours_for_every_feature() -> None:
    """So that skips above cannot hide everything."""
    for feature in FEATURES:
        case = make(STEPS["mixed"], spec_of(feature, dim=64, layer=LAYER), dtype=BF16)
        assert not reasons_against("triton", problem_of(case, CUDA)), feature
