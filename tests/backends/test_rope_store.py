"""Rotation and store in one op, against transformers' own rotation and the plain store."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.rope_op import ROPE_AND_STORE_KV
from paged_attn.backends.torch_native import TorchNativeBackend
from tests.backends.problems import LAYER, NAN, STRIDES, close, copy_of, make, restride, run, spec_of

NATIVE = TorchNativeBackend()
LENGTHS = [(17, 1), (0, 5), (6, 3)]


def angles(case, pairs):
    rate = 1 / 100 ** (torch.arange(pairs) / pairs)
    turned = case.batch.positions[:, None] * rate
    return turned.cos(), turned.sin()


def rotated(case, interleaved, pairs):
    """Query and key as transformers rotates them."""
    cos, sin = angles(case, pairs)
    results = []
    for x in (case.query, case.key):
        front, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        if interleaved:
            turned = rotate_interleaved(front[None], sin[None], cos[None])[0]
        else:
            wide = [torch.cat([t, t], -1)[None] for t in (cos, sin)]
            turned = rotate_halves(front[None], front[None], *wide, unsqueeze_dim=2)[0][0]
        results.append(torch.cat([turned, rest], -1))
    return results


def rotate_and_store(case, backend, interleaved, pairs, out_strides="contiguous"):
    out = restride(torch.full_like(case.query, NAN), out_strides)
    cos, sin = angles(case, pairs)
    with ForwardContext(case.batch, case.pool, backend):
        ROPE_AND_STORE_KV(case.query, case.key, case.value, cos, sin, out, LAYER, interleaved=interleaved)
    return out


def kernel_backend():
    """One that runs the Triton kernel also on the CPU, in the interpreter."""
    from paged_attn.backends.triton.rope_write import rotate_rows

    class Rotating(TorchNativeBackend):
        def rope_and_store(self, plan, layer_id, query, key, value, cos, sin, query_out, interleaved):
            keys, values = plan.pool.key(layer_id), plan.pool.value(layer_id)
            rotate_rows(query, key, value, cos, sin, query_out, keys, values, plan.batch.slots, plan.batch.num_tokens, interleaved)

    return Rotating()


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    if request.param == "torch":
        return NATIVE
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter runs where there is no GPU")
    return kernel_backend()


@pytest.mark.parametrize("pairs", [4, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("strides", STRIDES)
def test_rotates_as_transformers_does_and_stores(backend, strides, interleaved, pairs):
    case = make(LENGTHS, page_size=4, strides=strides, extra_rows=2)
    query, key = rotated(case, interleaved, pairs)
    plain = copy_of(case)
    plain.key = key
    run(plain, NATIVE)
    out = rotate_and_store(case, backend, interleaved, pairs, strides)
    tokens = case.batch.num_tokens
    close(out[:tokens], query[:tokens])
    assert not out[tokens:].any()
    for part in ("key", "value"):
        mine, theirs = (getattr(c.pool, part)(LAYER) for c in (case, plain))
        assert torch.equal(mine.isnan(), theirs.isnan())
        close(mine.nan_to_num(), theirs.nan_to_num())


def test_attention_after_it_gives_what_separate_steps_give(backend):
    case = make(LENGTHS, page_size=4)
    apart = copy_of(case)
    apart.query, apart.key = rotated(case, False, 4)
    expected, _ = run(apart, NATIVE)
    case.query = rotate_and_store(case, backend, False, 4)
    output, _ = run(case, NATIVE, save=False)
    close(output, expected)


def test_unequal_dims_and_16_bits(backend):
    case = make(LENGTHS, spec_of("wider_v"), page_size=4, dtype=torch.float16)
    query, _ = rotated(case, False, 4)
    out = rotate_and_store(case, backend, False, 4)
    close(out, query, torch.float16)
    page, offset = divmod(int(case.batch.slots[0]), 4)
    assert torch.equal(case.pool.value(LAYER)[page, offset], case.value[0])


def test_errors_name_what_is_wrong():
    case = make(LENGTHS, page_size=4)
    cos, sin = angles(case, 4)
    out = torch.empty_like(case.query)
    with pytest.raises(ContextError, match="outside any forward context"):
        ROPE_AND_STORE_KV(case.query, case.key, case.value, cos, sin, out, LAYER)
    with ForwardContext(case.batch, case.pool, NATIVE):
        with pytest.raises(ContextError, match="layer 7 is not in the pool"):
            ROPE_AND_STORE_KV(case.query, case.key, case.value, cos, sin, out, 7)
        with pytest.raises(ContextError, match=r"key has shape \[9, 1, 8\]; it must be \[9, 2, 8\]"):
            ROPE_AND_STORE_KV(case.query, case.key[:, :1], case.value, cos, sin, out, LAYER)
        with pytest.raises(ContextError, match="pairs from 1 to 4"):
            ROPE_AND_STORE_KV(case.query, case.key, case.value, cos.repeat(1, 2), sin.repeat(1, 2), out, LAYER)


def test_opcheck():
    case = make(LENGTHS, page_size=4)
    cos, sin = angles(case, 4)
    with ForwardContext(case.batch, case.pool, NATIVE):
        torch.library.opcheck(
            ROPE_AND_STORE_KV, (case.query, case.key, case.value, cos, sin, torch.empty_like(case.query), LAYER), {"interleaved": True}
        )
