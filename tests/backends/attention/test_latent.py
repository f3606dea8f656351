"""Latent attention: rows or expanded keys and values, in every kind of step, give what the model's own formula gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.hybrid import hybrid_of
from paged_attn.backends.attention.latent import expanded, paged, step
from paged_attn.backends.attention.latent.step import expands
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from tests.backends.latent_problems import SPECS, STEPS, make


def always(monkeypatch: pytest.MonkeyPatch, expand: bool) -> None:
    monkeypatch.setattr(step, "expands", lambda spec, new, cached: expand)


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


@pytest.mark.parametrize("backend", [TorchNativeBackend(), ReferenceBackend()])
@pytest.mark.parametrize(("kind", "lengths"), zip(SPECS, ("prompts", "decode", "mixed"), strict=True))
def test_queries_that_the_model_maps_itself(kind: str, lengths: str, backend: AttentionBackend) -> None:
    make(kind, STEPS[lengths], 4).assert_right_with_maps_of_the_model(backend)


@pytest.mark.parametrize("backend", [TorchNativeBackend(), ReferenceBackend(), hybrid_of(TorchNativeBackend(), ReferenceBackend())])
def test_a_step_is_dealt_out(monkeypatch: pytest.MonkeyPatch, backend: AttentionBackend) -> None:
    """Some requests one way and some the other, in one step."""
    asked = []

    def long_ones(spec: LatentSpec, new: int, cached: int) -> bool:
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
    whole = expanded.keys_and_values

    def counted(*args: object) -> tuple[Tensor, Tensor]:
        keys, values = whole(*args)  # type: ignore[arg-type]
        made.append(keys.nbytes + values.nbytes)
        return keys, values

    monkeypatch.setattr(expanded, "keys_and_values", counted)
    case = make(kind, ((100, 7), (0, 33), (37, 60)), 4)
    monkeypatch.setattr(expanded, "FEWEST_TOKENS", 5)
    monkeypatch.setattr(expanded, "MOST_BYTES", 8192)
    case.assert_right(TorchNativeBackend())
    assert len(made) > 9 and max(made) <= 8192


@pytest.mark.parametrize("kind", SPECS)
def test_new_prompts_are_expanded_together(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Those of like lengths by one call, filled up; one that goes on, and decoding requests, by themselves."""
    always(monkeypatch, True)
    made: list[int] = []
    of = step.FreshPrompts.of

    def counted(parts: list[slice], device: torch.device) -> step.FreshPrompts:
        made.append(len(parts))
        return of(parts, device)

    monkeypatch.setattr(step.FreshPrompts, "of", counted)
    make(kind, ((0, 9), (5, 1), (0, 40), (0, 33), (12, 8), (0, 40), (0, 10)), 4).assert_right(TorchNativeBackend())
    assert made == [3, 2], "by their lengths: 40, 40, 33, and 10, 9"


class AttendsExpanded(TorchNativeBackend):
    """Counts the plans of what is expanded for it."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[tuple[int, ...]] = []

    def attends_expanded(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> bool:
        return True

    def plan(self, batch: Batch, pool: KVPool) -> Any:
        if batch.page_size == 1:
            self.planned.append(batch.seq_lens_host)
        return super().plan(batch, pool)


@pytest.mark.parametrize("lengths", STEPS)
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_backend_attends_to_what_is_expanded(monkeypatch: pytest.MonkeyPatch, kind: str, lengths: str, page_size: int) -> None:
    always(monkeypatch, True)
    for way in ("attend_expanded", "FreshPrompts"):
        monkeypatch.setattr(step, way, lambda *_: pytest.fail("not by the backend"))
    backend = AttendsExpanded()
    make(kind, STEPS[lengths], page_size).assert_right(backend)
    assert backend.planned == ([] if lengths == "decode" else [tuple(cached + new for cached, new in STEPS[lengths])])


@pytest.mark.parametrize("kind", SPECS)
def test_a_backend_attends_to_as_many_as_fit_into_memory(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Requests that are not neighbours, too."""
    monkeypatch.setattr(step, "expands", lambda spec, new, cached: new > 2)
    monkeypatch.setattr(step, "most_tokens", lambda call: 50)
    backend = AttendsExpanded()
    make(kind, ((0, 9), (5, 1), (0, 40), (0, 33), (12, 8), (0, 10)), 4).assert_right(backend)
    assert backend.planned == [(9, 40), (33,), (20, 10)]


@pytest.mark.parametrize("kind", SPECS)
def test_longer_contexts_come_to_a_backend_in_parts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """All new; with a part that holds old and new tokens, and parts of old ones alone; and a short one besides."""
    monkeypatch.setattr(step, "expands", lambda spec, new, cached: new > 1)
    monkeypatch.setattr(step, "most_tokens", lambda call: 16)
    for way in ("attend_expanded", "FreshPrompts"):
        monkeypatch.setattr(step, way, lambda *_: pytest.fail("not by the backend"))
    backend = AttendsExpanded()
    make(kind, ((0, 50), (40, 21), (3, 1), (20, 12), (0, 9)), 4).assert_right(backend)
    assert [length for (length,) in backend.planned] == [9] + [16] * 9 + [2] + [16] * 6 + [13] + [16] * 2


def test_parts_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "expands", lambda spec, new, cached: True)
    monkeypatch.setattr(step, "most_tokens", lambda call: 16)
    made = []
    build = paged.KVPool

    def seen(*args: Any) -> KVPool:
        made.append(build(*args))
        return made[-1]

    monkeypatch.setattr(paged, "KVPool", seen)
    make("512 + 64", ((0, 50), (0, 70), (0, 9)), 4).assert_right(AttendsExpanded())
    assert [pool.num_pages for pool in made] == [17]


@pytest.mark.parametrize("expand", [False, True])
def test_bfloat16(monkeypatch: pytest.MonkeyPatch, expand: bool) -> None:
    always(monkeypatch, expand)
    make("512 + 64", STEPS["mixed"], 4, torch.bfloat16).assert_right(TorchNativeBackend(), 2e-2)


def test_batch_invariant_backends_attend_to_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("attend_expanded", "FreshPrompts"):
        monkeypatch.setattr(step, way, lambda *_: pytest.fail("expanded"))
    always(monkeypatch, True)
    make("512 + 64", STEPS["mixed"], 4).assert_right(ReferenceBackend(deterministic=True))


def test_which_way_is_taken() -> None:
    """DeepSeek-V2-Lite's sizes."""
    spec = LatentSpec(16, 1, 576, 512, 0.1, rotated=64, key_dim=128, value_dim=128, keys=HeadRows(0, 256), values=HeadRows(128, 256))
    assert expands(spec, 2048, 0) and expands(spec, 512, 4096)
    assert not expands(spec, 1, 0) and not expands(spec, 1, 100_000) and not expands(spec, 16, 4096)
