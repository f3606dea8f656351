"""Backends of GPUs that are not here, one at a time, on stand-ins for their packages; Triton's runs in its interpreter."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from paged_attn.backends.attention.base import AttentionBackend
from tests.backends.fake_fa3 import SCHEMA, FakeFA3


@contextmanager
def fa3() -> Iterator[AttentionBackend]:
    from paged_attn.backends.attention.fa3 import FA3Backend

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("fwd", FakeFA3().__call__, "CPU")
    package = types.ModuleType("sgl_kernel")
    package.flash_attn = types.ModuleType("sgl_kernel.flash_attn")  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sgl_kernel", package)
        patch.setitem(sys.modules, "sgl_kernel.flash_attn", package.flash_attn)
        yield FA3Backend()
    library._destroy()


@contextmanager
def flash_attn() -> Iterator[AttentionBackend]:
    from paged_attn.backends.attention.flash_attn import FlashAttnBackend
    from tests.backends.attention.test_flash_attn import FakeFlashAttn

    fake, package = FakeFlashAttn(), types.ModuleType("flash_attn")
    package.flash_attn_varlen_func = fake.flash_attn_varlen_func  # type: ignore[attr-defined]
    package.flash_attn_with_kvcache = fake.flash_attn_with_kvcache  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", package)
        yield FlashAttnBackend()


@contextmanager
def flashinfer() -> Iterator[AttentionBackend]:
    from paged_attn.backends.attention.flashinfer import wrappers
    from paged_attn.backends.attention.flashinfer.backend import FlashInferBackend
    from tests.backends.flashinfer import fake_flashinfer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrappers, "MIN_WORKSPACE", fake_flashinfer.WORKSPACE)
        fake_flashinfer.install(patch)
        yield FlashInferBackend()


@contextmanager
def trtllm_mha() -> Iterator[AttentionBackend]:
    from paged_attn.backends.attention.flashinfer import trtllm, wrappers
    from paged_attn.backends.attention.flashinfer.trtllm import TrtllmMhaBackend
    from tests.backends.flashinfer import fake_flashinfer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrappers, "MIN_WORKSPACE", 0)
        patch.setattr(trtllm, "WORKSPACE", 16 << 20)
        fake_flashinfer.install(patch)
        yield TrtllmMhaBackend()


@contextmanager
def triton() -> Iterator[AttentionBackend]:
    pytest.importorskip("triton")
    from paged_attn.backends.attention.triton.backend import TritonBackend

    yield TritonBackend()


MACHINES: dict[str, Callable[[], AbstractContextManager[AttentionBackend]]] = {
    made.__name__: made for made in (fa3, flash_attn, flashinfer, trtllm_mha, triton)
}
