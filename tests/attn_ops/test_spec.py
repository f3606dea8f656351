"""The layer spec: refusals, equality, description."""

import dataclasses

import pytest

from paged_attn.attn_ops.specs.attention import AttentionSpec

PLAIN = AttentionSpec(num_q_heads=4, num_kv_heads=2, qk_head_dim=8, v_head_dim=8, scale=8**-0.5)


def test_defaults_are_a_plain_causal_layer():
    assert PLAIN.causal and not PLAIN.has_sinks
    assert (PLAIN.sliding_window, PLAIN.chunk, PLAIN.softcap, PLAIN.alibi_slopes) == (None, None, None, None)
    assert PLAIN.group_size == 2


def test_is_frozen_and_hashable():
    assert len({PLAIN, dataclasses.replace(PLAIN), dataclasses.replace(PLAIN, chunk=8)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.scale = 1.0


@pytest.mark.parametrize("heads", [(4, 3), (4, 0), (1, 2), (4, -2)])
def test_query_heads_are_a_multiple_of_kv_heads(heads):
    with pytest.raises(ValueError, match=rf"model\.attn: {heads[0]} query heads over {heads[1]} KV heads; the first must be a multiple"):
        dataclasses.replace(PLAIN, num_q_heads=heads[0], num_kv_heads=heads[1], module="model.attn")


@pytest.mark.parametrize("name", ["sliding_window", "chunk"])
@pytest.mark.parametrize("value", [0, -1])
def test_windows_and_chunks_start_at_one(name, value):
    with pytest.raises(ValueError, match=rf"attention: {name} is {value}; allowed are None and integers >= 1"):
        dataclasses.replace(PLAIN, **{name: value})
    assert getattr(dataclasses.replace(PLAIN, **{name: 1}), name) == 1


def test_describe():
    assert PLAIN.describe() == "4 heads over 2 KV, dim 8, causal, scale 0.3536"
    full = dataclasses.replace(
        PLAIN, v_head_dim=4, causal=False, sliding_window=8, chunk=16, softcap=50.0, has_sinks=True, alibi_slopes=(1.0,) * 4, scale=1.0
    )
    assert full.describe() == "4 heads over 2 KV, dim 8/4, bidirectional, window 8, chunk 16, softcap 50, sinks, ALiBi, scale 1"


@pytest.mark.parametrize(
    "change",
    [
        {"num_q_heads": 8}, {"num_kv_heads": 1}, {"qk_head_dim": 16}, {"v_head_dim": 16}, {"scale": 1.0}, {"causal": False},
        {"sliding_window": 8}, {"chunk": 8}, {"softcap": 5.0}, {"has_sinks": True}, {"alibi_slopes": (1.0,) * 4}, {"kv_layer": 3},
        {"bias_index": "key"}, {"gives_lse": True},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_differences_name_the_field(change):
    assert PLAIN.differences(dataclasses.replace(PLAIN, **change)) == list(change)


def test_the_module_path_is_no_difference():
    assert PLAIN.differences(dataclasses.replace(PLAIN, module="model.layers.0.self_attn")) == []
