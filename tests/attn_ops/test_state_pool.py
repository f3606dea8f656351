"""State slots: shapes, sums, copies, and an allocator that never hands one slot to two requests."""

import pytest
import torch

from paged_attn.attn_ops.kv.state_pool import SlotAllocator, StatePool
from paged_attn.attn_ops.specs.recurrent import RecurrentSpec, StateSpec, slot_bytes

CONV = StateSpec("conv_states[0]", (6, 4), torch.float32)
SSM = StateSpec("recurrent_states[0]", (2, 3, 5), torch.bfloat16)
LAYERS = [RecurrentSpec("model.layers.0.mixer", (CONV, SSM)), RecurrentSpec("model.layers.2.conv", (CONV,))]


def test_bytes_are_those_of_every_state():
    assert [layer.nbytes for layer in LAYERS] == [6 * 4 * 4 + 30 * 2, 6 * 4 * 4]
    assert slot_bytes(LAYERS) == 252
    pool = StatePool(LAYERS, 5)
    assert pool.nbytes == 5 * 252 == sum(t.numel() * t.element_size() for i in range(2) for t in pool.states(i))


def test_states_have_the_shapes_and_dtypes_of_the_spec():
    pool = StatePool(LAYERS, 5)
    assert [(tuple(t.shape), t.dtype) for t in pool.states(0)] == [((5, 6, 4), torch.float32), ((5, 2, 3, 5), torch.bfloat16)]
    assert [tuple(t.shape) for t in pool.states(1)] == [(5, 6, 4)]
    assert CONV.describe() == "conv_states[0] 6x4 float32"


def test_copy_moves_every_layer_and_nothing_else():
    pool = StatePool(LAYERS, 4)
    states = [t for i in range(2) for t in pool.states(i)]
    for number, state in enumerate(states):
        state.copy_(torch.arange(4.0).reshape(4, *[1] * (state.dim() - 1)) + 10 * number)
    pool.copy(3, 1)
    for number, state in enumerate(states):
        assert [float(row.flatten()[0]) for row in state] == [10.0 * number + slot for slot in (0, 3, 2, 3)]
        assert all(bool((row == row.flatten()[0]).all()) for row in state)


def test_fill_poisons_one_slot_or_all():
    pool = StatePool(LAYERS, 3)
    pool.fill(float("nan"), 2)
    assert all(bool(t[2].isnan().all()) and not t[:2].isnan().any() for i in range(2) for t in pool.states(i))
    pool.fill(1.0)
    assert all(bool((t == 1).all()) for i in range(2) for t in pool.states(i))


@pytest.mark.parametrize("slots", [0, 1])
def test_a_pool_needs_a_slot_besides_the_reserved_one(slots):
    with pytest.raises(ValueError, match=f"at least 2 slots .*num_slots={slots}"):
        StatePool(LAYERS, slots)


def test_the_allocator_hands_out_every_slot_but_zero_once():
    slots = SlotAllocator(4)
    assert [slots.allocate() for _ in range(3)] == [1, 2, 3]
    assert slots.num_free == 0
    with pytest.raises(ValueError, match="all 3 state slots are taken"):
        slots.allocate()
    slots.free(2)
    assert (slots.num_free, slots.allocate()) == (1, 2)


def test_a_slot_that_nobody_holds_is_not_freed():
    slots = SlotAllocator(3)
    held = slots.allocate()
    slots.free(held)
    for slot in (held, 0, 7):
        with pytest.raises(ValueError, match=rf"slot {slot} is not held by anyone; held are \[\]"):
            slots.free(slot)
