"""Fixtures: FlashInfer's stand-in, the backend on it, thresholds low enough for small cases, and a count of plans."""

import pytest

from paged_attn.backends.attention.flashinfer import choose, wrappers
from paged_attn.backends.attention.flashinfer.backend import FlashInferBackend
from paged_attn.backends.attention.flashinfer.tables import HostLens
from tests.backends.flashinfer import fake_flashinfer


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(wrappers, "MIN_WORKSPACE", fake_flashinfer.WORKSPACE)
    return fake_flashinfer.install(monkeypatch)


@pytest.fixture
def backend():
    return FlashInferBackend()


@pytest.fixture
def eager_cascade(monkeypatch):
    monkeypatch.setattr(choose, "CASCADE_REQUESTS", 2)
    monkeypatch.setattr(choose, "CASCADE_TOKENS", 4)


@pytest.fixture
def counts(fake, monkeypatch):
    """How many wrappers were made and planned."""
    found = {"made": 0, "planned": 0}
    for module, name in (
        (fake, "BatchDecodeWithPagedKVCacheWrapper"),
        (fake, "BatchPrefillWithPagedKVCacheWrapper"),
        (fake, "BatchPrefillWithRaggedKVCacheWrapper"),
        (fake.mla, "BatchMLAPagedAttentionWrapper"),
    ):
        cls = getattr(module, name)

        class Counted(cls):
            def __init__(self, *args, **kwargs):
                found["made"] += 1
                super().__init__(*args, **kwargs)

            def plan(self, *args, **kwargs):
                found["planned"] += 1
                lens = kwargs.get("seq_lens", [])  # ragged plans and those for latents have none
                without = any(word in type(self).__base__.__name__ for word in ("Ragged", "MLA"))
                assert isinstance(lens, HostLens) or len(lens) == (not without), "max over all lengths"
                super().plan(*args, **kwargs)

        monkeypatch.setattr(module, name, Counted)
    return found
