"""Rotary embeddings in many spellings, and graphs rewritten with the pass that finds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paged_attn.attn_ops.rope_op import ROPE_AND_STORE_KV
from paged_attn.passes import runner
from paged_attn.passes.runner import OptionalPasses, Rewrite

Turn = Callable[[Tensor, Tensor, int], Tensor]  # x [1, heads, T, 8], positions [1, T] and how many pairs to turn -> x turned


def add_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for whenever a graph is rewritten from now on."""
    plain = runner._rewrite_into

    def and_rope(result: Rewrite, gm: fx.GraphModule, inputs: Sequence[Any], model: Any, optional: OptionalPasses) -> None:
        plain(result, gm, inputs, model, replace(optional, rope_and_store=True))

    monkeypatch.setattr(runner, "_rewrite_into", and_rope)


def ropes(result: Rewrite) -> list[fx.Node]:
    assert result.gm is not None, result.not_paged
    return [node for node in result.gm.graph.nodes if node.target is ROPE_AND_STORE_KV]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def angles(pos: Tensor, pairs: int) -> Tensor:
    return pos[..., None].float() / 10 ** (torch.arange(pairs) / pairs)


def half_turned(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def by_halves(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    turns = torch.cat((angles(pos, pairs), angles(pos, pairs)), dim=-1)
    cos, sin = turns.cos().unsqueeze(1), turns.sin().unsqueeze(1)
    front, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat((front * cos + half_turned(front) * sin, rest), dim=-1)


def by_chunks(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    turns = angles(pos, pairs)[:, None]
    front, rest = x.split([2 * pairs, x.shape[-1] - 2 * pairs], dim=-1)
    first, second = front.chunk(2, dim=-1)
    return torch.cat([first * turns.cos() - second * turns.sin(), second * turns.cos() + first * turns.sin(), rest], -1)


def on_rows(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    return by_halves(x.transpose(1, 2).contiguous().transpose(1, 2), pos, pairs).contiguous()


def scaled_up(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    """As YaRN does: it is all in the cosines and sines."""
    turns = angles(pos, pairs).repeat(1, 1, 2)[:, None]
    front, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat((front * (turns.cos() * 1.3) + half_turned(front) * (turns.sin() * 1.3), rest), dim=-1)


def interleaved(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    turns = angles(pos, pairs).repeat_interleave(2, dim=-1)[:, None]
    front, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat((front * turns.cos() + every_two(front) * turns.sin(), rest), dim=-1)


def interleaved_for_each(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    """GPT-J's: rows first, one table of sines and cosines, repeated for q and for k."""
    both = torch.cat((angles(pos, pairs).sin(), angles(pos, pairs).cos()), dim=-1)
    sin, cos = (torch.repeat_interleave(part[:, :, None, :], 2, 3) for part in (both[..., :pairs], both[..., pairs:]))
    x = x.transpose(1, 2)
    front = x[..., : 2 * pairs]
    return torch.cat((front * cos + every_two(front) * sin, x[..., 2 * pairs :]), dim=-1).permute(0, 2, 1, 3)


def interleaved_by_halves_of_the_table(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    """GLM's: a table for halves, of which the first half is repeated."""
    turns = torch.cat((angles(pos, pairs), angles(pos, pairs)), dim=-1)
    cos, sin = (part[:, None, :, :pairs].repeat_interleave(2, dim=-1) for part in (turns.cos(), turns.sin()))
    return torch.cat((x[..., : 2 * pairs] * cos + every_two(x[..., : 2 * pairs]) * sin, x[..., 2 * pairs :]), dim=-1)


def pairs_of_numbers(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    turns = angles(pos, pairs)[:, None]
    first, second = x[..., : 2 * pairs].unflatten(-1, (pairs, 2)).unbind(-1)
    parts = (first * turns.cos() - second * turns.sin(), second * turns.cos() + first * turns.sin())
    return torch.cat([torch.stack(parts, -1).flatten(-2), x[..., 2 * pairs :]], -1)


def complex_numbers(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    unit = torch.polar(torch.ones_like(angles(pos, pairs)), angles(pos, pairs))
    rows = x.transpose(1, 2)
    numbers = torch.view_as_complex(rows[..., : 2 * pairs].float().reshape(1, x.shape[2], -1, pairs, 2))
    turned = torch.view_as_real(numbers * unit[:, :, None, :]).flatten(3).type_as(x)
    return torch.cat([turned, rows[..., 2 * pairs :]], -1).transpose(1, 2)


TABLE = torch.cat([angles(torch.arange(40), 4)] * 2, dim=-1)


def off_a_table(x: Tensor, pos: Tensor, pairs: int) -> Tensor:
    turns = TABLE[:, : 2 * pairs][pos][:, None] if pairs == 4 else torch.cat([TABLE[:, :pairs]] * 2, -1)[pos][:, None]
    front = x[..., : 2 * pairs]
    return torch.cat((front * turns.cos() + half_turned(front) * turns.sin(), x[..., 2 * pairs :]), dim=-1)


SPELLINGS: dict[str, tuple[Turn, bool]] = {
    "halves": (by_halves, False),
    "chunks, angles once": (by_chunks, False),
    "on rows, made contiguous": (on_rows, False),
    "scaled": (scaled_up, False),
    "off a table": (off_a_table, False),
    "interleaved": (interleaved, True),
    "interleaved, repeated for each": (interleaved_for_each, True),
    "interleaved, half of the table": (interleaved_by_halves_of_the_table, True),
    "pairs": (pairs_of_numbers, True),
    "complex": (complex_numbers, True),
}
