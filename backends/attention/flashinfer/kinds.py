"""Kinds of layers: FlashInfer plans once per step for each, and layers of one kind share that plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool, once_per_pool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.base import AttentionCall

LN_2 = math.log(2.0)
RANK, ROTATED = 512, 64  # the only latent widths for which the kernels are known to be correct
MOST_ELEMENTS = 1 << 32  # in a pool: the latent kernels use 32-bit indices
VECTOR_BYTES = 16  # FlashInfer, like TMA, loads and stores this many at a time


@dataclass(frozen=True, slots=True)
class Kind:
    """Everything about a layer that FlashInfer's plan and run depend on. `window_left` is -1 without a window, `softcap` 0 without one.

    `rank` is 0 except for latents, whose values are the first `rank` elements of rows of width `head_dim`.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    causal: bool
    window_left: int
    softcap: float
    has_sinks: bool
    rank: int = 0

    @classmethod
    def of(cls, spec: AttentionSpec) -> Kind:
        """The kind of a layer.

        Raises:
            UnsupportedError: no kernel of FlashInfer computes it; a second guard, since selection checks this earlier.
        """
        latent = isinstance(spec, LatentSpec)
        dims = (spec.qk_head_dim, spec.v_head_dim)
        wrong = {
            f"chunk {spec.chunk}": spec.chunk is not None,
            "ALiBi slopes": spec.alibi_slopes is not None,
            f"biases by {spec.bias_index}": spec.bias_index is not None,
            f"head dims {spec.qk_head_dim} of qk and {spec.v_head_dim} of v": not latent and spec.qk_head_dim != spec.v_head_dim,
            f"latents of {spec.v_head_dim} in rows of {spec.qk_head_dim}": latent and dims != (RANK + ROTATED, RANK),
            "latents with a window, softcap or sinks": latent and (spec.sliding_window or spec.softcap or spec.has_sinks),
            "softcap together with sinks": spec.softcap is not None and spec.has_sinks,
        }
        if found := [what for what, present in wrong.items() if present]:
            raise UnsupportedError(
                f"flashinfer cannot run {spec.module or 'a layer'} ({spec.describe()}): no kernel for {', '.join(found)}; "
                "take backend='auto', or name another one"
            )
        return cls(
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.qk_head_dim,
            spec.scale,
            spec.causal,
            -1 if spec.sliding_window is None else spec.sliding_window - 1,
            spec.softcap or 0.0,
            spec.has_sinks,
            spec.v_head_dim if latent else 0,
        )

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class PoolKinds:
    """The distinct kinds of a pool's layers.

    `of_layer`: the index of each layer's kind (None for layers that no attention backend computes). `used`: pairs of such an index with
    True if some layer of that kind owns its KV, and with False if some layer reads another's.
    """

    kinds: tuple[Kind, ...]
    of_layer: tuple[int | None, ...]
    used: tuple[tuple[int, bool], ...]


@once_per_pool
def kinds_of(pool: KVPool) -> PoolKinds:
    """Finds the kinds of all layers of a pool.

    Raises:
        UnsupportedError: a layer that FlashInfer cannot run, or a pool whose pages it cannot read.
    """
    found: dict[Kind, int] = {}
    of_layer: list[int | None] = []
    used: dict[tuple[int, bool], None] = {}
    for layer, spec in enumerate(pool.layers):
        if not spec.by_backend:
            of_layer.append(None)
            continue
        index = found.setdefault(Kind.of(spec), len(found))
        _check_pages(layer, pool.key(layer), pool.value(layer))
        if isinstance(spec, LatentSpec):
            _check_size(pool)
        of_layer.append(index)
        used[index, spec.kv_layer == layer] = None
    return PoolKinds(tuple(found), tuple(of_layer), tuple(used))


def _check_pages(layer: int, key: Tensor, value: Tensor) -> None:
    """K and V must also have equal strides; in a KV pool they do if their head dims are equal."""
    if not (is_vectored(key) and is_vectored(value)):
        raise UnsupportedError(
            f"flashinfer reads {VECTOR_BYTES} bytes at a time, but K of layer {layer} has strides {key.stride()} in elements of "
            f"{key.element_size()} bytes, or starts in between; give all layers head dims that are multiples of 8, or take another backend"
        )


def _check_size(pool: KVPool) -> None:
    if pool.storage.numel() > MOST_ELEMENTS:
        raise UnsupportedError(
            f"flashinfer's kernels for latents use 32-bit indices, and the KV pool has {pool.storage.numel()} elements; allowed are "
            f"{MOST_ELEMENTS} ({MOST_ELEMENTS // pool.page_elements} pages of {pool.page_size}): set num_pages, or take another backend"
        )


def is_vectored(tensor: Tensor) -> bool:
    """Whether rows and heads start at multiples of VECTOR_BYTES and the last dim is contiguous."""
    step = VECTOR_BYTES // tensor.element_size()
    strides = tensor.stride()
    return strides[-1] == 1 and not any(s % step for s in strides[:-1]) and tensor.data_ptr() % VECTOR_BYTES == 0


def kind_for(layers: PoolKinds, call: AttentionCall, pool: KVPool) -> int:
    """The index of the kind of the calling layer.

    Raises:
        UnsupportedError: queries of another dtype than the pool's.
    """
    kind = layers.of_layer[call.layer_id]
    assert kind is not None, f"layer {call.layer_id} is not for an attention backend"
    if call.query.dtype != pool.dtype:
        raise UnsupportedError(
            f"flashinfer takes queries of the KV pool's dtype, {pool.dtype}; got {call.query.dtype}: make the pool with that dtype"
        )
    return kind
