"""Attention of every kind is found in graph order; what is of no known form is an error that names it; a router's softmax is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from paged_attn.attn_ops.errors import UnsupportedError
from tests.engine.tracing.test_flex_attention import needs_symbolic_length
from tests.passes.graphs import Toy, masked, rewrite_of

SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "F.softmax": lambda s: F.softmax(s, dim=-1),
    "torch.softmax": lambda s: torch.softmax(s, -1),
    "method": lambda s: s.softmax(-1),
    "float32": lambda s: F.softmax(s, dim=-1, dtype=torch.float32).to(s.dtype),
    "with a sink": lambda s: F.softmax(F.pad(s, (1, 0)), dim=-1)[..., 1:],
}


class WrittenOut(nn.Module):
    def __init__(self, softmax: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.softmax = softmax

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(2, 3) + torch.full((q.shape[2], q.shape[2]), -torch.inf).triu(1)
        return self.softmax(scores) @ v


class Layers(nn.Module):
    """One SDPA attention, and then the other."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([other])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return self.layers[0](F.scaled_dot_product_attention(q, k, v, is_causal=True), k, v)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_written_out_attention_is_found_after_sdpa(name: str) -> None:
    result = rewrite_of(Toy(Layers(WrittenOut(SOFTMAXES[name])), kv_heads=4))
    assert [(layer.found_by, layer.spec.module) for layer in result.layers] == [("F.sdpa", "attend"), ("softmax", "attend.layers.0")]


def test_a_softmax_over_a_part_of_the_heads_is_named() -> None:
    def softmax(s: Tensor) -> Tensor:
        return torch.stack([F.softmax(s[0, h], dim=-1) for h in range(4)])[None]

    with pytest.raises(UnsupportedError, match=r"attend\.layers\.0: .* runs over 1 of the 4 heads.*attn_implementation='sdpa'"):
        rewrite_of(Toy(Layers(WrittenOut(softmax)), kv_heads=4))


@needs_symbolic_length
def test_flex_attention_is_found() -> None:
    class Flex(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, float("-inf")))

    result = rewrite_of(Toy(Layers(Flex()), kv_heads=4))
    assert [layer.found_by for layer in result.layers] == ["F.sdpa", "flex_attention"]


@pytest.mark.parametrize("flat", [True, False])
def test_a_router_is_no_attention(flat: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        logits = q.sum(1)  # [1, T, 8 experts]
        weights = F.softmax(logits[0] if flat else logits, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * weights.reshape(1, 1, -1, 8)

    assert len(rewrite_of(Toy(attend, kv_heads=4)).layers) == 1


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no attention that paged_attn can see"):
        rewrite_of(Toy(lambda q, k, v, ids, pos: q))


def test_multihead_attention_that_is_one_operation_is_named() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        x = q.transpose(1, 2).reshape(1, -1, 32).transpose(0, 1)
        weights = torch.eye(32).repeat(3, 1), None, None, None, False, 0.0, torch.eye(32), None
        y, _ = F.multi_head_attention_forward(x, x, x, 32, 4, *weights, training=False, need_weights=False)
        return y.transpose(0, 1).reshape(1, -1, 4, 8).transpose(1, 2)

    with pytest.raises(UnsupportedError, match=r"nn\.MultiheadAttention, which a bare torch\.compile takes for one operation"):
        rewrite_of(Toy(attend, kv_heads=4))


def test_module_path_of_what_is_found() -> None:
    assert rewrite_of(masked(lambda ids, pos: None)).specs[0].module == "attend"
