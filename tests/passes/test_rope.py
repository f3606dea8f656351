"""A rotary embedding in front of attention is found in every spelling, and becomes one op with the store of K and V; nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.op import UNIFIED_ATTENTION
from paged_attn.attn_ops.rope_op import ROPE_AND_STORE_KV
from paged_attn.backends.rope_store import rotate
from paged_attn.passes.rotation_values import rotated
from paged_attn.passes.runner import Rewrite
from tests.engine.own_positions import Decoder, greedy_loop
from tests.passes.graphs import Toy, assert_ragged_equals_alone, called, rewrite_of
from tests.passes.rope_spellings import SPELLINGS, Turn, add_the_pass, angles, attend, by_halves, half_turned, interleaved, ropes

SHAPE_ONLY = (torch.ops.aten.sym_size.int, torch.ops.aten.new_empty.default)


@pytest.fixture(autouse=True)
def with_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    add_the_pass(monkeypatch)


def attentions(result: Rewrite) -> list[fx.Node]:
    assert result.gm is not None
    return [node for node in result.gm.graph.nodes if node.target is UNIFIED_ATTENTION]


def turning(turn: Turn, pairs: int = 4) -> Toy:
    return Toy(lambda q, k, v, ids, pos: attend(turn(q, pos, pairs), turn(k, pos, pairs), v))


@pytest.mark.parametrize("pairs", [4, 2])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_found(name: str, pairs: int) -> None:
    turn, is_interleaved = SPELLINGS[name]
    result = assert_ragged_equals_alone(turning(turn, pairs))
    (rope,), (attention,) = ropes(result), attentions(result)
    query, key, value, cos, sin, query_out, layer_id = rope.args
    assert rope.kwargs == {"interleaved": is_interleaved} and layer_id == 0
    for angle in (cos, sin):
        assert angle.meta["example_value"].shape[1:] == (pairs,)
        assert set(angle.users) == {rope}, "nothing else rotates"
    assert attention.args[:3] == (query_out, key, value) and attention.args[5] is False
    assert not [user for user in query.users if user.target not in (ROPE_AND_STORE_KV, *SHAPE_ONLY)]
    assert not [node for name in ("neg", "stack", "sub", "view_as_complex") for node in called(rope.graph, name)], "what rotated is gone"


def test_halves_are_told_from_pairs_by_values() -> None:
    """Both are sums of the same products, of other elements."""
    assert [ropes(rewrite_of(turning(turn)))[0].kwargs["interleaved"] for turn in (by_halves, interleaved)] == [False, True]


def test_heads_that_were_repeated_before_they_were_turned() -> None:
    """Falcon's: every second head of the key is stored."""

    def repeated(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(1, 2, 2, x.shape[2], 8).reshape(1, 4, -1, 8) for x in (k, v))
        return F.scaled_dot_product_attention(by_halves(q, pos, 4), by_halves(k, pos, 4), v, is_causal=True)

    result = assert_ragged_equals_alone(Toy(repeated))
    assert len(ropes(result)) == 1 and result.specs[0].num_kv_heads == 2


def test_norms_before_the_rotation_stay_in_front_of_it() -> None:
    def normed(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return attend(by_halves(F.rms_norm(q, (8,)), pos, 4), by_halves(F.rms_norm(k, (8,)), pos, 4), v)

    assert len(ropes(assert_ragged_equals_alone(Toy(normed)))) == 1


def test_half_precision_is_compared_in_single() -> None:
    """A cast to float32 and back is part of the rotation, and q is taken in its own type."""

    def cast(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
        return by_halves(x.float(), pos, pairs).to(x.dtype)

    (rope,) = ropes(rewrite_of(Toy(lambda q, k, v, ids, pos: attend(*(cast(x.bfloat16(), pos, 4) for x in (q, k)), v.bfloat16()).float())))
    query, *_, query_out, _ = rope.args
    assert query.meta["example_value"].dtype == query_out.meta["example_value"].dtype == torch.bfloat16


def test_layers_share_one_slice_of_the_cosines() -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        turns = torch.cat((angles(pos, 4), angles(pos, 4)), dim=-1)
        cos, sin = turns.cos(), turns.sin()

        def turned(x: Tensor) -> Tensor:
            return x * cos[:, None] + half_turned(x) * sin[:, None]

        second = attend(turned(q), turned(k), v)
        return attend(turned(second), turned(second[:, :2]), v)

    first, second = ropes(assert_ragged_equals_alone(Toy(twice)))
    assert first.args[3:5] == second.args[3:5] and second.args[6] == 1
    assert len(called(first.graph, "slice.Tensor")) == 2


def test_a_layer_of_two_kinds_of_angles_takes_its_own() -> None:
    def two(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        first = attend(by_halves(q, pos, 4), by_halves(k, pos, 4), v)
        return attend(by_halves(first, pos, 2), by_halves(first[:, :2], pos, 2), v)

    first, second = ropes(assert_ragged_equals_alone(Toy(two)))
    assert [rope.args[3].meta["example_value"].shape[1] for rope in (first, second)] == [4, 2]


def test_angles_that_were_filled_in_place_before() -> None:
    """As those of several axes are; the filled tensor is repeated."""

    def filled(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        cos, sin = angles(pos, 4).cos(), angles(pos, 4).sin()
        for part, other in ((cos, angles(2 * pos, 4).cos()), (sin, angles(2 * pos, 4).sin())):
            part[..., 1:2] = other[..., 1:2]
        cos, sin = (torch.cat((part, part), dim=-1)[:, None] for part in (cos, sin))
        return attend(q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin, v)

    assert len(ropes(assert_ragged_equals_alone(Toy(filled)))) == 1


def test_positions_that_the_op_of_the_batch_supplies() -> None:
    """The graph has no position_ids."""

    class Rotating(Decoder):
        def forward(self, idx: Tensor, targets: None = None) -> tuple[Tensor, None]:
            x, pos = self.embed(idx), torch.arange(idx.shape[1])[None]
            q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            attended = attend(by_halves(q, pos, 4), by_halves(k, pos, 4), v).transpose(1, 2).flatten(-2)
            return self.head(x + 3 * attended), None

    model, prompts = Rotating(lambda m, x: x), [[5, 7, 9], list(range(2, 21))]
    with LLM(model, page_size=4, num_pages=64, max_batch_tokens=16) as llm:
        assert len(ropes(llm.engine.runner.compiled.rewrite)) == 1
        got = llm.generate(prompts, SamplingParams(max_new_tokens=6))
    assert [c.token_ids for c in got] == [greedy_loop(model, p, 6) for p in prompts]


def test_the_proof_knows_what_the_op_computes() -> None:
    torch.manual_seed(0)
    x, cos, sin = torch.randn(5, 3, 8), torch.randn(5, 3), torch.randn(5, 3)
    for is_interleaved in (False, True):
        torch.testing.assert_close(rotated(x, cos, sin, is_interleaved), rotate(x, cos, sin, is_interleaved))


# What is left alone, and computes the same as before.

ONES = nn.Parameter(torch.ones(8))
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def with_turn(turn: Turn) -> Attend:
    return lambda q, k, v, ids, pos: attend(turn(q, pos, 4), turn(k, pos, 4), v)


def unlike_halves(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    turns = torch.cat((angles(pos, 4), 2 * angles(pos, 4)), dim=-1)[:, None]
    return x * turns.cos() + half_turned(x) * turns.sin()


def unlike_far_away(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    turns = torch.cat((angles(pos, 4), angles(pos + (pos > 70_000), 4)), dim=-1)[:, None]
    return x * turns.cos() + half_turned(x) * turns.sin()


def clamped(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    return by_halves(x, pos, pairs).clamp(-8, 8)


def backwards(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    turns = torch.cat((angles(pos, 4), angles(pos, 4)), dim=-1)[:, None]
    return x * turns.cos() - half_turned(x) * turns.sin()


def the_end_of_the_head(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    """DeepSeek's: the op turns the first elements."""
    return torch.cat((x[..., :4], by_halves(x[..., 4:], pos, 2)), dim=-1)


def written_after(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    turned = by_halves(x, pos, pairs)
    turned[..., 0] = 0.5
    return turned


def angles_written_between(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
    turns = torch.cat((angles(pos, 4), angles(pos, 4)), dim=-1)[:, None]
    cos, sin = turns.cos(), turns.sin()
    q = q * cos + half_turned(q) * sin
    cos.mul_(2)
    return attend(q, k * cos + half_turned(k) * sin, v)


def angles_of_what_changes(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
    """Both are spelled alike."""
    turns = torch.cat((angles(pos, 4), angles(pos, 4)), dim=-1)[:, None]
    q = q * turns.cos() + half_turned(q) * turns.sin()
    turns.mul_(2)
    return attend(q, k * turns.cos() + half_turned(k) * turns.sin(), v)


def projection_written_between(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
    turned = by_halves(q, pos, 4)
    q.mul_(3)
    return attend(turned, by_halves(k, pos, 4), v) + 0.1 * q


def shared_keys(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
    k = by_halves(k, pos, 4)
    return attend(by_halves(attend(by_halves(q, pos, 4), k, v), pos, 4), k, v)


def read_elsewhere(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
    q = by_halves(q, pos, 4)
    return attend(q, by_halves(k, pos, 4), v) + 0.1 * q


REFUSED: dict[str, Attend] = {
    "no rotation": lambda q, k, v, ids, pos: attend(q, k, v),
    "of the query alone": lambda q, k, v, ids, pos: attend(by_halves(q, pos, 4), k, v),
    "of the key alone": lambda q, k, v, ids, pos: attend(q, by_halves(k, pos, 4), v),
    "by other angles": lambda q, k, v, ids, pos: attend(by_halves(q, 2 * pos, 4), by_halves(k, pos, 4), v),
    "by other pairs": lambda q, k, v, ids, pos: attend(by_halves(q, pos, 4), interleaved(k, pos, 4), v),
    "then a norm": with_turn(lambda x, pos, pairs: F.rms_norm(by_halves(x, pos, pairs), (8,))),
    "then a scale": with_turn(lambda x, pos, pairs: by_halves(x, pos, pairs) * 0.5),
    "then a parameter that happens to be one": with_turn(lambda x, pos, pairs: by_halves(x, pos, pairs) * ONES),
    "then a clamp": with_turn(clamped),
    "then a write": with_turn(written_after),
    "halves that differ": with_turn(unlike_halves),
    "halves that differ far away": with_turn(unlike_far_away),
    "backwards": with_turn(backwards),
    "the end of the head": with_turn(the_end_of_the_head),
    "angles that change": angles_written_between,
    "angles of what changes": angles_of_what_changes,
    "a projection that changes": projection_written_between,
    "keys of two layers": shared_keys,
    "read elsewhere": read_elsewhere,
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_else_is_left_alone(name: str) -> None:
    assert ropes(assert_ragged_equals_alone(Toy(REFUSED[name]))) == []
