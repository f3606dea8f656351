"""Neighbouring parts of a product that go through the same operations go through them once; the results lie where two would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from paged_attn import LLM, SamplingParams
from paged_attn.passes.optimize.linears.merge_rotations import merge_rotations
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build

Q, K, DIM, T = 4, 2, 8, 5
Use = Callable[..., Any]
NUMBERS = torch.Generator().manual_seed(0)
GIVEN = [torch.randn(1, T, width, generator=NUMBERS) for width in ((Q + 2 * K) * DIM, DIM, DIM)]  # the product, cos and sin


def half_turn(x: Tensor) -> Tensor:
    return torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), dim=-1)


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + half_turn(x) * sin


def by_chunks(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = cos[..., : DIM // 2], sin[..., : DIM // 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = x[..., :4] * cos[..., :4] + torch.cat((-x[..., 2:4], x[..., :2]), dim=-1) * sin[..., :4]
    return torch.cat((turned, x[..., 4:]), dim=-1)


def parts(product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.narrow(product, -1, start * DIM, heads * DIM) for start, heads in ((0, Q), (Q, K), (Q + K, K)))  # type: ignore[return-value]


def heads_first(rotate: Use) -> Use:
    def use(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k, v = (part.view(1, part.shape[1], -1, DIM).transpose(1, 2) for part in parts(product))
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return rotate(q, cos, sin)[0].permute(1, 0, 2), rotate(k, cos, sin)[0].permute(1, 0, 2), v

    return use


def tokens_first(rotate: Use) -> Use:
    def use(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k, v = (part.view(1, part.shape[1], -1, DIM) for part in parts(product))
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    return use


def with_numbers_of_heads(rotate: Use) -> Use:
    def use(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k, v = parts(product)
        q, k = q.view(1, q.shape[1], Q, DIM), k.view(1, k.shape[1], K, DIM)
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    return use


def rewritten(use: Use) -> tuple[int, fx.GraphModule, list[Any]]:
    """The number of merged pairs, the graph of `use` with T symbolic, and its inputs."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append((gm, [each.node.hint if isinstance(each, torch.SymInt) else each for each in inputs]))
        return gm.forward

    torch._dynamo.reset()
    for each in GIVEN:
        torch._dynamo.mark_dynamic(each, 1)
    torch.compile(use, backend=backend, fullgraph=True)(*GIVEN)
    gm, inputs = found[0]
    count = merge_rotations(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return count, gm, inputs


@pytest.mark.parametrize("rotate", [by_halves, by_chunks, partly])
@pytest.mark.parametrize("layout", [heads_first, tokens_first, with_numbers_of_heads])
def test_spellings(rotate: Use, layout: Callable[[Use], Use]) -> None:
    use = layout(rotate)
    count, gm, inputs = rewritten(use)
    got, expected = gm(*inputs), use(*GIVEN)
    assert count == 1
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    query, key = got[:2]
    assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr(), "one buffer"
    for node, value in zip(gm.graph.output_node().args[0], got, strict=True):
        traced = node.meta["example_value"].stride()
        assert [a for a, size in zip(traced, value.shape, strict=True) if size > 1][-2:] == [
            stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1
        ][-2:], "what is traced behind knows where the results lie"


def other_factors(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k, _ = parts(product)
    return q.view(1, q.shape[1], -1, DIM) * cos.unsqueeze(2), k.view(1, k.shape[1], -1, DIM) * sin.unsqueeze(2)


def over_heads(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k, _ = (part.view(1, part.shape[1], -1, DIM) for part in parts(product))
    return q.softmax(2), k.softmax(2)


def two_results(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k, _ = (part.view(1, part.shape[1], -1, DIM) for part in parts(product))
    return q.exp(), k.exp(), q.neg(), k.neg()


def read_inside(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k, _ = (part.view(1, part.shape[1], -1, DIM) for part in parts(product))
    wider = q.exp()
    return wider.neg(), k.exp().neg(), wider.sum()


def views_alone(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return [part.view(1, part.shape[1], -1, DIM).transpose(1, 2) for part in parts(product)]


def used_before(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k, _ = (part.view(1, part.shape[1], -1, DIM) for part in parts(product))
    first = q.exp()
    row = first.sum((1, 2, 3), keepdim=True)
    return first, (k * 1).exp() + row


def written_between(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k, _ = (part.view(1, part.shape[1], -1, DIM) for part in parts(product))
    own = cos.clone().unsqueeze(2)
    first = q * own
    own.add_(1)
    return first, k * own


def rotated(product: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k, _ = tokens_first(by_halves)(product, cos, sin)
    return q, k


def dense_for_a_view(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = rotated(product, cos, sin)
    return q.view(-1, DIM), k * 2


def dense_for_strides(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = rotated(product, cos, sin)
    return torch.as_strided(q, (T, Q, DIM), (Q * DIM, DIM, 1)), k * 2


_mine = torch.library.Library("rotation_test", "DEF")
_mine.define("in_memory(Tensor x) -> Tensor")
_mine.impl("in_memory", lambda x: torch.as_strided(x, (x.numel(),), (1,)) + 0, "CompositeExplicitAutograd")
torch.library.register_fake("rotation_test::in_memory", lambda x: x.new_empty(x.numel()), lib=_mine)


def dense_for_a_foreign_op(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = rotated(product, cos, sin)
    return torch.ops.rotation_test.in_memory(q), k * 2


def strides_of_all_tokens(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """[2, T, heads, 8]: how far the second half is from the first depends on T."""
    q, k, _ = (part.view(1, part.shape[1], -1, DIM) for part in parts(product))
    return [torch.cat((each * cos.unsqueeze(2), each * sin.unsqueeze(2))) for each in (q, k)]


def the_product_itself(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    product = product * 1
    q, k, _ = (torch.dropout(part.view(1, part.shape[1], -1, DIM), 0.0, False) for part in parts(product))
    q.add_(1)
    k.add_(2)
    return q, k, product + 1


def not_neighbours(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, _, v = (part.view(1, part.shape[1], -1, DIM) for part in parts(product))
    return q.exp(), v.exp()


@pytest.mark.parametrize(
    "use", [other_factors, over_heads, two_results, read_inside, views_alone, used_before, not_neighbours, written_between,
            dense_for_a_view, dense_for_strides, dense_for_a_foreign_op, strides_of_all_tokens, the_product_itself]
)  # fmt: skip
def test_left_alone(use: Use) -> None:
    count, gm, inputs = rewritten(use)
    assert count == 0
    for one, other in zip(gm(*inputs), use(*GIVEN), strict=True):
        assert torch.equal(one, other)


def test_a_part_is_one_of_a_single_pair() -> None:
    """With three alike, the second is not computed once more with the third."""
    count, gm, inputs = rewritten(lambda product, cos, sin: [part.view(1, part.shape[1], -1, DIM).exp() for part in parts(product)])
    assert count == 1 and sorted(node.args[3] for node in gm.graph.find_nodes(op="call_function", target=torch.narrow)) == [16, 48]
    for one, other in zip(gm(*inputs), [part.view(1, T, -1, DIM).exp() for part in parts(GIVEN[0])], strict=True):
        assert torch.equal(one, other)


def test_what_is_taken_apart_knows_where_it_lies() -> None:
    def use(product: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = rotated(product, cos, sin)
        return *q.split(3, -1), *k.unbind(2)

    count, gm, inputs = rewritten(use)
    assert count == 1
    for node, value in zip(gm.graph.output_node().args[0], gm(*inputs), strict=True):
        assert node.meta["example_value"].stride()[1:] == value.stride()[1:]


@pytest.mark.parametrize(("kind", "pairs"), [("llama", 3), ("qwen2", 3), ("stablelm", 3), ("qwen3", 0)])
def test_models(kind: str, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair a layer, but none where q and k have norms of their own: the model's own tokens."""
    model, counts = build(kind), []
    monkeypatch.setattr("paged_attn.passes.pass_list.merge_rotations", lambda graph: counts.append(merge_rotations(graph)) or counts[-1])
    prompts = random_prompts((3, 9))
    with LLM(model, merge_linears=True) as llm:
        got = [each.token_ids for each in llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))]
    assert [list(each) for each in got] == [greedy(model, prompt, 6) for prompt in prompts] and counts[0] == pairs
