"""The op of latent attention: schema, opcheck, refusals; and what a token takes of the pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.batch.part import part_of
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.kv_pool import KVPool, page_elements
from paged_attn.attn_ops.ops.kinds import KINDS
from paged_attn.attn_ops.ops.latent import LATENT_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from paged_attn.capture.split.split_ops import split_ops

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
SPEC = LatentSpec(2, 1, 10, 8, 0.5, rotated=2, key_dim=4, value_dim=3, keys=HeadRows(0, 7), values=HeadRows(4, 7))
V2_LITE = LatentSpec(16, 1, 576, 512, 0.1147, rotated=64, key_dim=128, value_dim=128, keys=HeadRows(0, 256), values=HeadRows(128, 256))


def operands(rows: int = 3) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (rows, 2, 6), (rows, 8), (rows, 2), (14, 8)
    query, latent, rotated, weight = (torch.randn(shape, generator=draw) for shape in shapes)
    return [query, latent, rotated, weight, weight, torch.zeros(rows, 2, 3)]


def batch_of(new: int = 3) -> Batch:
    return Batch.build([BatchRequest([1] * new, [1, 2], 0, 1)], 4)


def test_opcheck() -> None:
    with ForwardContext(batch_of(), KVPool([SPEC], 3, 4, torch.float32), TorchNativeBackend()):
        torch.library.opcheck(LATENT_ATTENTION, (*operands(), 0), test_utils=UTILITIES)


def test_a_bias_of_values_is_added_to_every_output() -> None:
    results = []
    for bias in (None, torch.arange(6.0).view(2, 3)):
        with ForwardContext(batch_of(), KVPool([SPEC], 3, 4, torch.float32), TorchNativeBackend()):
            given = operands()
            LATENT_ATTENTION(*given, 0, bias)
            results.append(given[-1])
    assert torch.equal(results[1], results[0] + torch.arange(6.0).view(2, 3))


def test_it_splits_graphs_and_may_be_captured() -> None:
    (kind,) = (kind for kind in KINDS if kind.op is LATENT_ATTENTION)
    assert LATENT_ATTENTION in split_ops() and kind.in_full_graphs and kind.on_disk


def test_outside_a_context() -> None:
    with pytest.raises(ContextError, match="latent_attention_with_output was called outside any forward context; wrap the call"):
        LATENT_ATTENTION(*operands(), 0)


def test_another_batch() -> None:
    with ForwardContext(batch_of(), KVPool([SPEC], 3, 4, torch.float32), TorchNativeBackend()):
        with pytest.raises(ContextError, match="latent_attention_with_output got 5 rows but the forward context's batch has 3"):
            LATENT_ATTENTION(*operands(5), 0)


@pytest.mark.parametrize("layer", [AttentionSpec(2, 1, 10, 8, 0.5), replace(SPEC, qk_head_dim=11, rotated=3)])
@pytest.mark.parametrize("layer_id", [0, 1])
def test_another_models_pool(layer: AttentionSpec, layer_id: int) -> None:
    with ForwardContext(batch_of(), KVPool([layer], 3, 4, torch.float32), TorchNativeBackend()):
        with pytest.raises(ContextError, match=f"layer {layer_id} of the pool is not the model's, which keeps a row of 10 values a token"):
            LATENT_ATTENTION(*operands(), layer_id)


def test_a_token_takes_one_row_of_the_pool() -> None:
    layers = [replace(V2_LITE, kv_layer=index) for index in range(27)]
    assert page_elements(layers, 1) * 2 == 31_104  # bytes in bfloat16
    plain = [AttentionSpec(16, 16, 192, 128, 0.1147, kv_layer=index) for index in range(27)]
    assert page_elements(plain, 1) * 2 == 276_480


def test_values_are_part_of_the_keys_row() -> None:
    pool = KVPool(
        [AttentionSpec(2, 1, 4, 4, 1.0), replace(SPEC, kv_layer=1), AttentionSpec(2, 1, 4, 4, 1.0, kv_layer=2)], 5, 3, torch.float32
    )
    assert pool.nbytes == 5 * 3 * (8 + 10 + 8) * 4
    assert pool.key(1).shape == (5, 3, 1, 10) and pool.value(1).shape == (5, 3, 1, 8)
    pool.key(1).fill_(1.0)
    assert pool.value(1).eq(1).all() and pool.storage.sum() == 5 * 3 * 10 and not pool.key(2).any() and not pool.value(0).any()


def test_weights_are_read_where_they_lie() -> None:
    weight = torch.arange(14 * 8.0).view(14, 8)
    values = SPEC.values.of(weight, 2, 3)
    assert torch.equal(values, torch.stack([weight[4:7], weight[11:14]])) and values.data_ptr() == weight[4:].data_ptr()
    parts = torch.cat([torch.zeros(2, 8), weight])[2:]
    assert torch.equal(SPEC.keys.of(parts, 2, 4), torch.stack([weight[0:4], weight[7:11]]))
    assert torch.equal(SPEC.keys.of(weight.T.contiguous().T, 2, 4), torch.stack([weight[0:4], weight[7:11]]))


def test_words() -> None:
    assert V2_LITE.describe() == "16 heads of one latent of 512 + 64 rotated, dim 192/128, causal, scale 0.1147"
    assert (V2_LITE.value_dim, V2_LITE.kv_elements, V2_LITE.rank, V2_LITE.by_backend) == (128, 576, 512, True)


def test_a_part_of_a_batch_is_what_would_be_built_of_its_requests() -> None:
    requests = [BatchRequest([5], [3], 2, 1, 3), BatchRequest([6, 7, 8], [4, 1], 3, 1, 1), BatchRequest([9, 2], [2], 0, 1, 2)]
    part, rows = part_of(Batch.build(requests, 4), [1, 2])
    alone = Batch.build(requests[1:], 4)
    assert rows.tolist() == [1, 2, 3, 4, 5] and part.num_rows == part.num_tokens == alone.num_tokens == 5
    for name in ("input_ids", "positions", "slots", "page_table", "seq_lens", "query_lens", "query_start", "state_slots"):
        assert torch.equal(getattr(part, name), getattr(alone, name)), name
    assert (part.mode, part.seq_lens_host, part.query_lens_host) == (alone.mode, alone.seq_lens_host, alone.query_lens_host)
    assert part.state_slots_host == alone.state_slots_host == (1, 2)
    assert part.page_table_host is not None and part.page_table_host.tolist() == part.page_table.tolist()
