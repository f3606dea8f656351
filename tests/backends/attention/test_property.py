"""For random problems, every backend that claims to fit gives the reference's numbers: here on the CPU, in tests/gpu on the GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.reference import ReferenceBackend
from tests.backends.fitting import instance, problem_of, reasons_against, usable_names
from tests.backends.problems import LAYER, LAYOUTS, STRIDES, Case, close, copy_of, make, new_output, restride, run

ORACLE = ReferenceBackend()


@dataclass(frozen=True)
class Axes:
    """What random problems vary over; a GPU test keeps them few, because each combination may be a kernel to compile."""

    heads: tuple[tuple[int, int], ...] = ((4, 2), (2, 2), (7, 1), (6, 2))
    dims: tuple[tuple[int, int], ...] = ((8, 8), (8, 4), (4, 12), (5, 5), (16, 16), (16, 32))
    page_sizes: tuple[int, ...] = (1, 2, 16, 64)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    features: tuple[str, ...] = ("bidirectional", "window", "chunk", "softcap", "sinks", "alibi", "bias")
    longest: int = 40


@st.composite
def specs(draw: st.DrawFn, axes: Axes) -> AttentionSpec:
    q_heads, kv_heads = draw(st.sampled_from(axes.heads))
    qk_dim, v_dim = draw(st.sampled_from(axes.dims))
    chosen = draw(st.sets(st.sampled_from(axes.features), max_size=4))
    slopes = st.tuples(*[st.sampled_from([0.5, 0.25, 0.0])] * q_heads)
    biases = ["key"] if "bidirectional" in chosen else ["key", "distance"]  # a distance is not negative
    return AttentionSpec(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        qk_head_dim=qk_dim,
        v_head_dim=v_dim,
        scale=draw(st.sampled_from([1.0, qk_dim**-0.5])),
        causal="bidirectional" not in chosen,
        sliding_window=draw(st.integers(1, axes.longest)) if "window" in chosen else None,
        chunk=draw(st.integers(1, axes.longest)) if "chunk" in chosen else None,
        softcap=draw(st.sampled_from([1.5, 30.0])) if "softcap" in chosen else None,
        has_sinks="sinks" in chosen,
        alibi_slopes=draw(slopes) if "alibi" in chosen else None,
        bias_index=draw(st.sampled_from(biases)) if "bias" in chosen else None,
        kv_layer=LAYER,
    )


@st.composite
def cases(draw: st.DrawFn, axes: Axes) -> Case:
    decode = draw(st.booleans())
    length = (
        st.tuples(st.integers(0, axes.longest), st.integers(1, 6)) if not decode else st.tuples(st.integers(1, axes.longest), st.just(1))
    )
    return make(
        draw(st.lists(length, min_size=1, max_size=5)),
        draw(specs(axes)),
        page_size=draw(st.sampled_from(axes.page_sizes)),
        dtype=draw(st.sampled_from(axes.dtypes)),
        layout=draw(st.sampled_from(LAYOUTS)),
        strides=draw(st.sampled_from(STRIDES)),
        extra_rows=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1000)),
    )


def expected_of(case: Case, lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The oracle's numbers, in float32, on the CPU."""
    return run(copy_of(case), ORACLE, lse=lse, output=new_output(case).float())


def agree(name: str, case: Case, expected: torch.Tensor, expected_lse: torch.Tensor | None, strides: str = "contiguous") -> None:
    """`case` is on the backend's device; rows past the real tokens must be zeros."""
    output = restride(new_output(case), strides)
    output, lse = run(case, instance(name), lse=expected_lse is not None, output=output)
    count = case.batch.num_tokens
    close(output, expected, case.query.dtype)
    assert not output[count:].any()
    if expected_lse is not None and lse is not None:
        close(lse, expected_lse, case.query.dtype)
        assert not lse[count:].any()


def agreeing_backends(case: Case, device: torch.device, lse: bool, strides: str, left_out: frozenset[str] = frozenset()) -> list[str]:
    """All backends that fit, after each gave the reference's numbers; one may still refuse with a reason, never give other numbers."""
    problem = problem_of(case, device, lse=lse)
    fitting = [name for name in usable_names(device.type) if name not in left_out and not reasons_against(name, problem)]
    expected, expected_lse = expected_of(case, lse) if fitting else (None, None)
    agreed = []
    for name in fitting:
        assert expected is not None
        try:
            agree(name, case.to(device), expected, expected_lse, strides)
        except UnsupportedError:
            continue
        agreed.append(name)
    return agreed


@settings(max_examples=120, deadline=None)
@given(case=cases(Axes()), lse=st.booleans(), strides=st.sampled_from(STRIDES))
def test_every_backend_that_fits_gives_the_references_numbers(case: Case, lse: bool, strides: str) -> None:
    assert "torch_native" in agreeing_backends(case, torch.device("cpu"), lse, strides)


def test_a_backend_that_claims_what_it_can_not_is_seen(monkeypatch) -> None:
    """Negative control: torch_native with the window left out of its numbers, but not of its claims."""
    case = make([(20, 1), (0, 9)], AttentionSpec(4, 2, 8, 8, 0.4, sliding_window=3, kv_layer=LAYER), page_size=4)
    expected, _ = expected_of(case, lse=False)
    agree("torch_native", case.to("cpu"), expected, None)
    native = type(instance("torch_native"))
    honest = native.forward

    def forward(self, plan, layer_id, spec, *args, **kwargs):
        return honest(self, plan, layer_id, dataclasses.replace(spec, sliding_window=None), *args, **kwargs)

    monkeypatch.setattr(native, "forward", forward)
    try:
        agree("torch_native", case.to("cpu"), expected, None)
    except AssertionError as error:
        assert "not close" in str(error)
    else:
        raise AssertionError("a window that is ignored was not seen")
