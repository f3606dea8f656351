"""F.scaled_dot_product_attention in each call form gives the right spec and the right numbers; what is not paged is declined."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.find.attention_site import UnknownAttention
from paged_attn.passes.find.sdpa import find_sdpa
from paged_attn.passes.fx.call_form import CallNotPaged
from tests.passes.graphs import Toy, assert_ragged_equals_alone, masked, rewrite_of, trace

sdpa = F.scaled_dot_product_attention
aten_sdpa = torch.ops.aten.scaled_dot_product_attention.default
DEFAULT = 1 / math.sqrt(8)


def lower(t: int) -> Tensor:
    return torch.ones(t, t, dtype=torch.bool).tril()


# name: (call of q, k, v with equal heads and a causal mask m; the scale that its spec must have)
CALL_FORMS: dict[str, tuple[Callable[..., Tensor], float]] = {
    "mask positional": (lambda q, k, v, m: sdpa(q, k, v, m), DEFAULT),
    "mask by keyword": (lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), DEFAULT),
    "everything by keyword": (lambda q, k, v, m: sdpa(query=q, value=v, key=k, attn_mask=m, dropout_p=0.0, is_causal=False), DEFAULT),
    "is_causal positional": (lambda q, k, v, m: sdpa(q, k, v, None, 0.0, True), DEFAULT),
    "is_causal by keyword": (lambda q, k, v, m: sdpa(q, k, v, is_causal=True), DEFAULT),
    "scale None": (lambda q, k, v, m: sdpa(q, k, v, m, scale=None), DEFAULT),
    "scale": (lambda q, k, v, m: sdpa(q, k, v, m, scale=0.7), 0.7),
    "scale 0": (lambda q, k, v, m: sdpa(q, k, v, m, scale=0.0), 0.0),
    "aten overload": (lambda q, k, v, m: aten_sdpa(q, k, v, m, 0.0, False, scale=0.7), 0.7),
}
if Version(torch.__version__) < Version("2.14"):  # newer ones refuse it themselves
    CALL_FORMS["mask and is_causal"] = (lambda q, k, v, m: sdpa(q, k, v, m | True, is_causal=True), DEFAULT)


@pytest.mark.parametrize("name", CALL_FORMS)
def test_each_call_form(name: str) -> None:
    call, scale = CALL_FORMS[name]
    result = assert_ragged_equals_alone(Toy(lambda q, k, v, ids, pos: call(q, k, v, lower(q.shape[2])), kv_heads=4))
    (spec,) = result.specs
    assert (spec.causal, spec.sliding_window, spec.chunk) == (True, None, None)
    assert spec.scale == pytest.approx(scale)
    assert (spec.num_q_heads, spec.num_kv_heads, spec.qk_head_dim, spec.v_head_dim) == (4, 4, 8, 8)
    assert result.layers[0].found_by == "F.sdpa"


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_enable_gqa(kv_heads: int) -> None:
    module = Toy(lambda q, k, v, ids, pos: sdpa(q, k, v, is_causal=True, enable_gqa=True), kv_heads=kv_heads)
    assert assert_ragged_equals_alone(module).specs[0].num_kv_heads == kv_heads


def grouped(t: Tensor) -> Tensor:
    return t.unflatten(1, (2, -1))


BIASES = -torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(4, 1, 1)


def sloped(t: int) -> Tensor:
    """[4, T, T]: ALiBi, and -inf where hidden."""
    index = torch.arange(t)
    return (BIASES * (index[:, None] - index)).masked_fill(~lower(t), float("-inf"))


# name: (call of q, k, v with so many KV heads, these; whether its spec has slopes)
OTHER_DIMS: dict[str, tuple[Callable[..., Tensor], int, bool]] = {
    "three": (lambda q, k, v: sdpa(q[0], k[0], v[0], is_causal=True)[None], 4, False),
    "three, with a mask": (lambda q, k, v: sdpa(q[0], k[0], v[0], lower(q.shape[2]))[None], 4, False),
    "three, with biases": (lambda q, k, v: sdpa(q[0], k[0], v[0], sloped(q.shape[2]))[None], 4, True),
    "five": (lambda q, k, v: sdpa(grouped(q), grouped(k), grouped(v), is_causal=True).flatten(1, 2), 2, False),
    "five, with biases": (
        lambda q, k, v: sdpa(grouped(q), grouped(k), grouped(v), sloped(q.shape[2]).unflatten(0, (2, 2))).flatten(1, 2), 2, True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_DIMS)
def test_dims_other_than_four(name: str) -> None:
    call, kv_heads, sloping = OTHER_DIMS[name]
    result = assert_ragged_equals_alone(Toy(lambda q, k, v, ids, pos: call(q, k, v), kv_heads=kv_heads))
    (spec,) = result.specs
    assert (spec.num_q_heads, spec.num_kv_heads, spec.scale) == (4, kv_heads, pytest.approx(DEFAULT))
    assert spec.alibi_slopes == ((0.5, 0.25, 0.125, 0.0625) if sloping else None)


def test_one_key_head_that_broadcasts() -> None:
    result = assert_ragged_equals_alone(Toy(lambda q, k, v, ids, pos: sdpa(q, k, v, is_causal=True), kv_heads=1))
    assert (result.specs[0].num_q_heads, result.specs[0].num_kv_heads) == (4, 1)


def test_values_narrower_than_keys_and_a_scale_from_the_keys() -> None:
    module = Toy(lambda q, k, v, ids, pos: sdpa(q, k, v, is_causal=True, enable_gqa=True), dim=16, v_dim=6)
    (spec,) = assert_ragged_equals_alone(module).specs
    assert (spec.qk_head_dim, spec.v_head_dim, spec.scale) == (16, 6, 0.25)


def test_no_mask_and_not_causal_is_bidirectional() -> None:
    assert not rewrite_of(masked(lambda ids, pos: None)).specs[0].causal


def test_every_attention_is_found_in_order() -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return sdpa(sdpa(q, k, v, is_causal=True, scale=0.5), k, v, is_causal=True, scale=0.25)

    traced = trace(Toy(twice, kv_heads=4), lambda t: find_sdpa(t.gm.graph, t.form))
    assert [site.scores.scale for site in traced.result] == [0.5, 0.25]
    assert traced.result[1].query is traced.result[0].node


DECLINES: dict[str, tuple[Callable[..., Tensor], type[Exception], str]] = {
    "dropout": (lambda q, k, v: sdpa(q, k, v, dropout_p=0.1, is_causal=True), UnsupportedError, r"dropout is 0\.1; call model\.eval"),
    "dropout positional": (lambda q, k, v: sdpa(q, k, v, None, 0.1, True), UnsupportedError, "dropout"),
    "heads as batch": (
        lambda q, k, v: sdpa(*(t.transpose(0, 1) for t in (q, k, v)), is_causal=True).transpose(0, 1), UnsupportedError, "one row"
    ),
    "keys twice as many": (
        lambda q, k, v: sdpa(q, torch.cat([k, k], 2), torch.cat([v, v], 2)), CallNotPaged, "brings a cache or another sequence"
    ),
    "one key more": (lambda q, k, v: sdpa(q, F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))), UnknownAttention, "belong to no token"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINES)
def test_declines(name: str) -> None:
    call, error, words = DECLINES[name]
    module: Any = Toy(lambda q, k, v, ids, pos: call(q, k, v), kv_heads=4)
    with pytest.raises(error, match=words):
        trace(module, lambda traced: find_sdpa(traced.gm.graph, traced.form))


def test_attention_within_each_token_is_no_attention_over_tokens() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        over_heads = sdpa(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
        return sdpa(over_heads, k, v, is_causal=True)

    result = assert_ragged_equals_alone(Toy(attend, kv_heads=4))
    assert len(result.layers) == 1


def test_longer_keys_make_the_call_not_paged_rather_than_an_error() -> None:
    call = DECLINES["keys twice as many"][0]
    result = rewrite_of(Toy(lambda q, k, v, ids, pos: call(q, k, v), kv_heads=4))
    assert result.gm is None and "brings a cache" in result.not_paged


def test_keys_and_values_of_different_numbers_of_heads_are_refused() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return sdpa(q, k, torch.cat([v, v * 2, v * 3, v * 4], 1), is_causal=True)

    with pytest.raises(UnsupportedError, match="1 heads of keys but 4 of values"):
        rewrite_of(Toy(attend, kv_heads=1))


def test_attention_that_reads_another_attention_directly() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        first = sdpa(q, k, v, is_causal=True)
        return sdpa(first, first, first, is_causal=True)

    result = assert_ragged_equals_alone(Toy(attend, kv_heads=4))
    assert [spec.kv_layer for spec in result.specs] == [0, 1]


def test_layers_that_share_keys_and_values_share_their_pages() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        first = sdpa(q, k, v, is_causal=True, enable_gqa=True)
        second = sdpa(first, k, v, is_causal=True, enable_gqa=True)
        return sdpa(second, k, v * 2, is_causal=True, enable_gqa=True)

    result = assert_ragged_equals_alone(Toy(attend))
    assert [spec.kv_layer for spec in result.specs] == [0, 0, 2]
