"""Latent attention: rows or expanded keys and values, in every kind of step, give what the model's own formula gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.latent import LATENT_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.hybrid import hybrid_of
from paged_attn.backends.attention.latent import expanded, step
from paged_attn.backends.attention.latent.choose import expands
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.torch_native import TorchNativeBackend

LAYER = 1  # between two plain layers
PLAIN = AttentionSpec(2, 1, 8, 8, 1.0)
# (cached, new) of each request
STEPS = {
    "prompts": ((0, 5), (0, 1), (0, 13)),
    "decode": ((4, 1), (15, 1), (16, 1), (1, 1)),
    "mixed": ((7, 1), (0, 9), (16, 5), (3, 1), (31, 2)),
    "chunks": ((16, 16), (5, 11), (40, 7)),
}
SPECS = {"512 + 64": (32, 8, 12, 10, False), "no rotated part": (16, 0, 8, 8, False), "rotated first": (20, 4, 6, 12, True)}


def spec_of(kind: str, heads: int = 4) -> LatentSpec:
    rank, rotated, key_dim, value_dim, first = SPECS[kind]
    return LatentSpec(
        heads, 1, rank + rotated, rank, (key_dim + rotated) ** -0.5 * 1.2, kv_layer=LAYER, rotated=rotated, key_dim=key_dim,
        value_dim=value_dim, rotated_first=first, keys=HeadRows(0, key_dim + value_dim), values=HeadRows(key_dim, key_dim + value_dim),
    )  # fmt: skip


@dataclass
class Case:
    """A step over a pool whose unused slots, and whose padded rows, are NaN; `expected` [tokens, heads, value_dim] in float64."""

    spec: LatentSpec
    batch: Batch
    pool: KVPool
    query: Tensor
    rows: Tensor
    weight: Tensor
    expected: Tensor

    def run(self, backend: AttentionBackend) -> Tensor:
        """[rows, heads, value_dim]"""
        shape = (self.batch.num_rows, self.spec.num_q_heads, self.spec.value_dim)
        output = torch.full(shape, float("nan"), dtype=self.query.dtype)
        rotated = self.rows[:, self.spec.rank :] if self.spec.rotated else None
        with ForwardContext(self.batch, self.pool, backend):
            LATENT_ATTENTION(self.query, self.rows[:, : self.spec.rank], rotated, self.weight, self.weight, output, LAYER)
        return output

    def assert_right(self, backend: AttentionBackend, tolerance: float = 1e-5) -> None:
        before = self.pool.storage.clone()
        output, count = self.run(backend), self.batch.num_tokens
        assert not output[count:].any(), "padding is zeroed"
        error = (output[:count].double() - self.expected).abs().max() / self.expected.abs().max()
        assert error <= tolerance
        slots = self.batch.slots[:count]
        kept = self.pool.key(LAYER)[slots // self.batch.page_size, slots % self.batch.page_size, 0]
        assert torch.equal(kept, self.rows[:count])
        self.pool.key(LAYER)[slots // self.batch.page_size, slots % self.batch.page_size] = float("nan")
        assert torch.equal(self.pool.storage.nan_to_num(7.0), before.nan_to_num(7.0)), "nothing else is written"


def make(kind: str, lengths: tuple[tuple[int, int], ...], page_size: int, dtype: torch.dtype = torch.float32, padding: int = 3) -> Case:
    spec, draw = spec_of(kind), torch.Generator().manual_seed(1)
    heads, width = spec.num_q_heads, spec.key_dim + spec.value_dim
    pages = sum(-(-(cached + new) // page_size) for cached, new in lengths)
    order = (torch.randperm(pages, generator=draw) + 1).tolist()
    pool = KVPool([PLAIN, spec, replace(PLAIN, kv_layer=2)], pages + 2, page_size, dtype)
    pool.storage.fill_(float("nan"))
    weight = (torch.randn(heads * width, spec.rank, generator=draw) * 0.4).to(dtype)
    requests, new_rows, queries, expected = [], [], [], []
    for cached, new in lengths:
        table = [order.pop() for _ in range(-(-(cached + new) // page_size))]
        requests.append(BatchRequest([1] * new, table, cached, 1))
        rows = torch.randn(cached + new, spec.qk_head_dim, generator=draw).to(dtype)
        query = torch.randn(new, heads, spec.key_dim + spec.rotated, generator=draw).to(dtype)
        for position in range(cached):
            pool.key(LAYER)[table[position // page_size], position % page_size, 0] = rows[position]
        new_rows.append(rows[cached:])
        queries.append(query)
        expected.append(dense(spec, query, rows, weight))
    batch = Batch.build(requests, page_size)
    more = torch.zeros(padding, dtype=torch.int64)
    batch = replace(batch, input_ids=torch.cat([batch.input_ids, more]), slots=torch.cat([batch.slots, more]))
    missing = batch.num_rows - batch.num_tokens
    query, rows = (torch.cat([*each, torch.full((missing, *each[0].shape[1:]), float("nan"), dtype=dtype)]) for each in (queries, new_rows))
    return Case(spec, batch, pool, query, rows, weight, torch.cat(expected))


def dense(spec: LatentSpec, query: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """The model's own formula for the last tokens of one request, in float64: [new, heads, value_dim]."""
    products = rows[:, : spec.rank].double() @ weight.double().T  # [length, heads * (key_dim + value_dim)]
    keys, values = products.unflatten(-1, (spec.num_q_heads, -1)).split([spec.key_dim, spec.value_dim], -1)
    shared = rows[:, None, spec.rank :].double().expand(-1, spec.num_q_heads, -1)
    keys = torch.cat((shared, keys) if spec.rotated_first else (keys, shared), -1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * spec.scale
    new, length = len(query), len(rows)
    hidden = torch.arange(length) > torch.arange(length - new, length)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def always(monkeypatch: pytest.MonkeyPatch, expand: bool) -> None:
    monkeypatch.setattr(step, "expands", lambda spec, new, cached, device: expand)


@pytest.mark.parametrize("expand", [False, True], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("lengths", STEPS)
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_both_ways_in_every_step(monkeypatch: pytest.MonkeyPatch, kind: str, lengths: str, page_size: int, expand: bool) -> None:
    always(monkeypatch, expand)
    make(kind, STEPS[lengths], page_size).assert_right(TorchNativeBackend())


@pytest.mark.parametrize("lengths", STEPS)
def test_the_reference(monkeypatch: pytest.MonkeyPatch, lengths: str) -> None:
    always(monkeypatch, False)
    make("512 + 64", STEPS[lengths], 4).assert_right(ReferenceBackend())


@pytest.mark.parametrize("backend", [TorchNativeBackend(), ReferenceBackend(), hybrid_of(TorchNativeBackend(), ReferenceBackend())])
def test_a_step_is_dealt_out(monkeypatch: pytest.MonkeyPatch, backend: AttentionBackend) -> None:
    """Some requests one way and some the other, in one step."""
    asked = []

    def long_ones(spec: LatentSpec, new: int, cached: int, device: str) -> bool:
        asked.append((cached, new))
        return new > 2

    monkeypatch.setattr(step, "expands", long_ones)
    case = make("512 + 64", STEPS["mixed"], 4)
    case.assert_right(backend)
    assert asked == list(STEPS["mixed"]), "once for the step"


@pytest.mark.parametrize("kind", SPECS)
def test_a_context_is_expanded_in_parts_of_bounded_memory(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    always(monkeypatch, True)
    made: list[int] = []
    whole = expanded._expanded

    def counted(*args: object) -> tuple[Tensor, Tensor]:
        keys, values = whole(*args)  # type: ignore[arg-type]
        made.append(keys.nbytes + values.nbytes)
        return keys, values

    monkeypatch.setattr(expanded, "_expanded", counted)
    case = make(kind, ((100, 7), (0, 33), (37, 60)), 4)
    monkeypatch.setattr(expanded, "FEWEST_TOKENS", 5)
    monkeypatch.setattr(expanded.attend_expanded, "__defaults__", (8192,))
    case.assert_right(TorchNativeBackend())
    assert len(made) > 9 and max(made) <= 8192


@pytest.mark.parametrize("expand", [False, True])
def test_bfloat16(monkeypatch: pytest.MonkeyPatch, expand: bool) -> None:
    always(monkeypatch, expand)
    make("512 + 64", STEPS["mixed"], 4, torch.bfloat16).assert_right(TorchNativeBackend(), 2e-2)


def test_batch_invariant_backends_attend_to_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "attend_expanded", lambda *_: pytest.fail("expanded"))
    always(monkeypatch, True)
    make("512 + 64", STEPS["mixed"], 4).assert_right(ReferenceBackend(deterministic=True))


def test_which_way_is_taken() -> None:
    """DeepSeek-V2-Lite's sizes."""
    spec = LatentSpec(16, 1, 576, 512, 0.1, rotated=64, key_dim=128, value_dim=128, keys=HeadRows(0, 256), values=HeadRows(128, 256))
    assert expands(spec, 2048, 0, "cuda") and expands(spec, 512, 4096, "cuda")
    assert not expands(spec, 1, 0, "cuda") and not expands(spec, 1, 100_000, "cuda") and not expands(spec, 16, 4096, "cuda")
