"""Keys and values that are maps of one row per token: every spelling is found and proved, and what only looks like it stays plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.passes.report import Rewrite
from tests.passes.graphs import VOCAB, assert_ragged_equals_alone

HEADS, RANK, SHARED, NOPE, VALUE = 4, 12, 4, 8, 6
LATENTS = ("latent_attention",)
KeysAndValues = tuple[Tensor, Tensor]


class Latent(nn.Module):
    """A causal model of one layer; `expand(self, latent [1, T, RANK], shared [1, 1, T, SHARED])`: keys and values [1, HEADS, T, dim]."""

    def __init__(
        self, expand: Callable[[Latent, Tensor, Tensor], KeysAndValues], dim: int = NOPE + SHARED, bias: bool = False, rank: int = RANK
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.expand, self.dim = expand, dim
        self.embed = nn.Embedding(VOCAB, 32)
        self.q = nn.Linear(32, HEADS * dim)
        self.kv_a = nn.Linear(32, rank + SHARED)
        self.norm = nn.RMSNorm(rank)
        self.kv_b = nn.Linear(rank, HEADS * (NOPE + VALUE), bias=bias)
        self.k_b = nn.Linear(rank, HEADS * NOPE, bias=False)
        self.v_b = nn.Linear(rank, HEADS * VALUE, bias=False)
        self.own = nn.Linear(32, HEADS * SHARED)
        self.head = nn.Linear(HEADS * VALUE, VOCAB)
        self.columns = nn.Parameter(torch.empty(rank, HEADS * (NOPE + VALUE)))
        self.by_head = nn.Parameter(torch.empty(HEADS, rank, NOPE + VALUE))
        for weight in (self.kv_b.weight, self.k_b.weight, self.v_b.weight, self.columns, self.by_head, *([self.kv_b.bias] if bias else [])):
            nn.init.normal_(weight, std=0.5)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.x = x = self.embed(input_ids) + torch.sin(position_ids[..., None] * 0.1)
        latent, shared = self.kv_a(x).split([self.kv_a.out_features - SHARED, SHARED], -1)
        turned = shared * torch.cos(position_ids[..., None] * 0.3) + shared.flip(-1) * torch.sin(position_ids[..., None] * 0.3)
        query = self.q(x).unflatten(-1, (HEADS, self.dim)).transpose(1, 2)
        keys, values = self.expand(self, self.norm(latent), turned[:, None])
        return self.head(self.attend(query, keys, values).transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=0.3)


def heads_of(product: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    return product.unflatten(-1, (HEADS, sum(sizes))).transpose(1, 2).split(list(sizes), -1)


def concatenated(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    keys, values = heads_of(self.kv_b(latent), NOPE, VALUE)
    return torch.cat((keys, shared.expand(-1, HEADS, -1, -1)), -1), values


def copied_in_place(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    keys, values = heads_of(self.kv_b(latent[:, None])[:, 0], NOPE, VALUE)
    whole = keys.new_empty(*keys.shape[:-1], NOPE + SHARED)
    whole[..., :NOPE].copy_(keys)
    whole[..., NOPE:] = shared
    return whole, values


def of_two_products(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    keys, values = self.k_b(latent).view(1, -1, HEADS, NOPE), self.v_b(latent).view(1, -1, HEADS, VALUE)
    return torch.cat((keys.transpose(1, 2), shared.repeat(1, HEADS, 1, 1)), -1), values.transpose(1, 2)


def rotated_first(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    values, keys = heads_of(self.kv_b(latent), VALUE, NOPE)
    return torch.cat((shared.expand(-1, HEADS, -1, -1), keys), -1), values.contiguous()


def all_keys_then_all_values(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    keys, values = self.kv_b(latent).split([HEADS * NOPE, HEADS * VALUE], -1)
    keys = torch.cat((keys.unflatten(-1, (HEADS, NOPE)), shared.transpose(1, 2).expand(-1, -1, HEADS, -1)), -1)
    return keys.transpose(1, 2), values.unflatten(-1, (HEADS, VALUE)).transpose(1, 2)


def shared_in_two_pieces(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    turned = torch.cat((shared[..., :2] * 2, shared[..., 2:] - 1), -1)
    return concatenated(self, latent, turned)


def without_a_shared_part(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    keys, values = heads_of(self.kv_b(latent), NOPE, VALUE)
    return keys, values


def scaled_latent(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    return concatenated(self, latent * 1.5, shared)


def joined(keys: Tensor, values: Tensor, shared: Tensor) -> KeysAndValues:
    """A size read off a tensor that is made of other things."""
    return torch.cat((keys, shared.expand_as(keys[..., :SHARED])), -1), values


def weight_by_columns(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    return joined(*heads_of(torch.matmul(latent, self.columns), NOPE, VALUE), shared)


def weight_by_heads(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    return joined(*(latent[:, None] @ self.by_head).split([NOPE, VALUE], -1), shared)


def einsum_with_a_view(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    weight = self.kv_b.weight.view(HEADS, NOPE + VALUE, -1)
    keys, values = (torch.einsum("btr,hdr->bhtd", latent, part) for part in (weight[:, :NOPE], weight[:, NOPE:]))
    return joined(keys, values, shared)


def parts_of_a_weight(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    keys, values = (F.linear(latent, part) for part in self.kv_b.weight.split([HEADS * NOPE, HEADS * VALUE]))
    return joined(*heads_of(keys, NOPE), *heads_of(values, VALUE), shared)


def flat_rows(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    product = torch.mm(latent.view(-1, latent.shape[-1]), self.kv_b.weight.t())
    return joined(*heads_of(product.view(1, -1, HEADS * STRIDE), NOPE, VALUE), shared)


def heads_behind(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    product = self.kv_b(latent).unflatten(-1, (NOPE + VALUE, HEADS)).permute(0, 3, 1, 2)
    return joined(product[..., :NOPE], product[..., NOPE:], shared)


STRIDE = NOPE + VALUE
SPELLINGS = {
    concatenated: (HeadRows(0, STRIDE), HeadRows(NOPE, STRIDE)),
    copied_in_place: (HeadRows(0, STRIDE), HeadRows(NOPE, STRIDE)),
    of_two_products: (HeadRows(0, NOPE), HeadRows(0, VALUE)),
    rotated_first: (HeadRows(VALUE, STRIDE), HeadRows(0, STRIDE)),
    all_keys_then_all_values: (HeadRows(0, NOPE), HeadRows(HEADS * NOPE, VALUE)),
    shared_in_two_pieces: (HeadRows(0, STRIDE), HeadRows(NOPE, STRIDE)),
    without_a_shared_part: (HeadRows(0, STRIDE), HeadRows(NOPE, STRIDE)),
    scaled_latent: (HeadRows(0, STRIDE), HeadRows(NOPE, STRIDE)),
    weight_by_columns: (HeadRows(0, STRIDE), HeadRows(NOPE, STRIDE)),
    weight_by_heads: (HeadRows(0, RANK * STRIDE), HeadRows(NOPE, RANK * STRIDE)),
    einsum_with_a_view: (HeadRows(0, STRIDE), HeadRows(NOPE, STRIDE)),
    parts_of_a_weight: (HeadRows(0, NOPE), HeadRows(HEADS * NOPE, VALUE)),
    flat_rows: (HeadRows(0, STRIDE), HeadRows(NOPE, STRIDE)),
    heads_behind: (HeadRows(0, 1, HEADS), HeadRows(NOPE * HEADS, 1, HEADS)),
}


@pytest.mark.parametrize("expand", SPELLINGS, ids=lambda expand: expand.__name__)
def test_every_spelling_is_found(expand: Callable[..., KeysAndValues]) -> None:
    shared = 0 if expand is without_a_shared_part else SHARED
    found = assert_ragged_equals_alone(Latent(expand, NOPE + shared), optional=LATENTS)
    (spec,) = found.specs
    assert isinstance(spec, LatentSpec) and found.counts["latent_attention"] == 1
    assert (spec.keys, spec.values) == SPELLINGS[expand]
    assert (spec.rank, spec.rotated, spec.key_dim, spec.value_dim, spec.scale) == (RANK, shared, NOPE, VALUE, 0.3)
    assert spec.rotated_first == (expand is rotated_first) and spec.kv_elements == RANK + shared
    assert "heads in order" in found.layers[0].proof


class TwoLayers(nn.Module):
    """Their weights are alike, but for how they lie in memory."""

    def __init__(self, turned: Sequence[bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Latent(weight_by_columns) for _ in turned)
        for layer, turn in zip(self.layers, turned, strict=True):
            if turn:
                layer.columns = nn.Parameter(layer.columns.detach().t().contiguous().t())

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        first, second = (layer(input_ids, position_ids) for layer in self.layers)
        return first + second  # type: ignore[no-any-return]


@pytest.mark.parametrize("turned", [(False, True), (True, False)])
def test_weights_of_two_layers_lie_otherwise_in_memory(turned: Sequence[bool]) -> None:
    found = assert_ragged_equals_alone(TwoLayers(turned), optional=LATENTS)
    assert [isinstance(spec, LatentSpec) for spec in found.specs] == [not turn for turn in turned]


class WrittenOut(Latent):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        hidden = torch.full((query.shape[2], query.shape[2]), float("-inf")).triu(1)
        return F.softmax(query @ keys.transpose(2, 3) * 0.25 + hidden, -1) @ values


def test_attention_that_is_written_out() -> None:
    (spec,) = assert_ragged_equals_alone(WrittenOut(concatenated), optional=LATENTS).specs
    assert isinstance(spec, LatentSpec) and spec.scale == 0.25


@pytest.mark.parametrize("written", [Latent, WrittenOut], ids=["sdpa", "softmax"])
def test_a_bias_of_values_goes_to_the_output_and_one_of_keys_has_no_effect(written: type[Latent]) -> None:
    found = assert_ragged_equals_alone(written(concatenated, bias=True), optional=LATENTS)
    assert isinstance(found.specs[0], LatentSpec) and "heads in order, with a bias" in found.layers[0].proof


class Padded(Latent):
    """Queries, keys and values are made wider for a kernel, and the output is cut."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        query, keys, values = (F.pad(each, (0, 16 - each.shape[-1])) for each in (query, keys, values))
        return super().attend(query, keys, values)[..., :VALUE]


def test_zeros_are_not_kept() -> None:
    (spec,) = assert_ragged_equals_alone(Padded(concatenated), optional=LATENTS).specs
    assert isinstance(spec, LatentSpec) and (spec.key_dim, spec.rotated, spec.value_dim) == (NOPE, SHARED, VALUE)


class Absorbed(Latent):
    """Queries and outputs are mapped by the model; `join` makes keys of latent and shared part [1, 1, T, ..]."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(concatenated)
        self.join = join

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        weight = self.kv_b.weight.view(HEADS, NOPE + VALUE, -1)
        latent, shared = self.rows
        query = self.join(query[..., :NOPE] @ weight[:, :NOPE], query[..., NOPE:])
        keys, values = (each.expand(-1, HEADS, -1, -1) for each in (self.join(latent, shared), latent))
        return super().attend(query, keys, values) @ weight[:, NOPE:].mT


def kept_for_later(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    self.rows = latent[:, None], shared
    return latent, latent


@pytest.mark.parametrize("shared_first", [False, True], ids=["latent first", "shared part first"])
def test_a_model_that_absorbs_by_itself_keeps_one_row(shared_first: bool) -> None:
    model = Absorbed(lambda latent, shared: torch.cat((shared, latent) if shared_first else (latent, shared), -1))
    model.expand = kept_for_later
    found = assert_ragged_equals_alone(model, optional=LATENTS)
    (spec,) = found.specs
    assert isinstance(spec, LatentSpec) and (spec.keys, spec.values) == (None, None) and spec.kv_elements == RANK + SHARED
    assert spec.rotated_first == shared_first and "the values are 12 of a token's key + 4 that all heads share" in found.layers[0].proof


def test_a_key_that_holds_its_value_in_another_order_stays_plain() -> None:
    model = Absorbed(lambda latent, shared: torch.cat((latent[..., 6:], latent[..., :6], shared), -1))
    model.expand = kept_for_later
    stays_plain(assert_ragged_equals_alone(model, optional=LATENTS), "its keys and values hold the same row in another order")


def scaled_keys(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    keys, values = concatenated(self, latent, shared)
    return keys * 0.5, values


def other_heads(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    keys, values = concatenated(self, latent, shared)
    return keys, values[:, [1, 0, 2, 3]]


def own_rotated_part(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    keys, values = heads_of(self.kv_b(latent), NOPE, VALUE)
    return torch.cat((keys, self.own(self.x).unflatten(-1, (HEADS, SHARED)).transpose(1, 2) + shared), -1), values


def shared_in_another_order(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    keys, values = heads_of(self.kv_b(latent), NOPE, VALUE)
    parts = shared.expand(-1, HEADS, -1, -1).split(2, -1)
    return torch.cat((parts[0], keys, parts[1]), -1), values


def last_head_unlike_the_others(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    keys, values = heads_of(self.kv_b(latent), NOPE, VALUE)
    whole = torch.cat((keys, shared.expand(-1, HEADS, -1, -1)), -1).clone()
    whole[:, 3, :, :SHARED] = shared[:, 0]
    return whole, values


def keys_of_something_else(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    keys, _ = heads_of(self.kv_b(latent + 0.1), NOPE, VALUE)
    _, values = heads_of(self.kv_b(latent), NOPE, VALUE)
    return torch.cat((keys, shared.expand(-1, HEADS, -1, -1)), -1), values


def latent_changed_later(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    result = concatenated(self, latent, shared)
    latent.mul_(2.0)
    return result


def shared_part_changed_later(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    shared = shared.clone()
    result = concatenated(self, latent, shared)
    shared.mul_(2.0)
    return result


LOOK_ALIKES = {
    latent_changed_later: "its row is written in place after keys or values were made of it",
    shared_part_changed_later: "its row is written in place after keys or values were made of it",
    scaled_keys: "its keys are not made of the 12 values",
    other_heads: "its values have their heads in another order",
    own_rotated_part: "is not one row per token",
    shared_in_another_order: "its keys hold the shared part in another order",
    last_head_unlike_the_others: "its heads differ",
    keys_of_something_else: "its keys are not made of the 12 values",
}


def stays_plain(found: Rewrite, why: str) -> None:
    (layer,) = found.layers
    assert not isinstance(layer.spec, LatentSpec) and found.counts["latent_attention"] == 0
    assert ("stay expanded" in layer.proof) == bool(why) and why in layer.proof, layer.proof


@pytest.mark.parametrize("expand", LOOK_ALIKES, ids=lambda expand: expand.__name__)
def test_what_only_looks_like_it_stays_plain_and_says_why(expand: Callable[..., KeysAndValues]) -> None:
    stays_plain(assert_ragged_equals_alone(Latent(expand), optional=LATENTS), LOOK_ALIKES[expand])


def two_latents(self: Latent, latent: Tensor, shared: Tensor) -> KeysAndValues:
    parts = [F.linear(each, self.k_b.weight[:, :4]).unflatten(-1, (2, 16)).transpose(1, 2) for each in (latent[..., :4], latent[..., 4:8])]
    keys, values = torch.cat(parts, 1).split([10, VALUE], -1)
    return torch.cat((keys, shared.expand(-1, HEADS, -1, -1)[..., :2]), -1), values


def test_two_latents_stay_plain() -> None:
    stays_plain(
        assert_ragged_equals_alone(Latent(two_latents), optional=LATENTS), "its values are made of 2 rows of 4 and 4 values, not of one"
    )


def test_a_wide_row_is_no_latent() -> None:
    stays_plain(
        assert_ragged_equals_alone(Latent(concatenated, rank=40), optional=LATENTS), "its row of 40 + 4 values is not narrow compared with"
    )
    stays_plain(assert_ragged_equals_alone(Latent(concatenated, rank=90), optional=LATENTS), "")


class Windowed(Latent):
    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        at = torch.arange(query.shape[2])
        seen = (at <= at[:, None]) & (at > at[:, None] - 5)
        return F.scaled_dot_product_attention(query, keys, values, seen)


def test_a_window_stays_plain() -> None:
    stays_plain(assert_ragged_equals_alone(Windowed(concatenated), optional=LATENTS), "its mask has a window")


def test_it_is_asked_for() -> None:
    stays_plain(assert_ragged_equals_alone(Latent(concatenated)), "")
