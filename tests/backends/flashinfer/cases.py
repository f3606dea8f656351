"""Specs, batches and helpers that the tests of FlashInfer share."""

import torch

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.flashinfer import wrappers
from paged_attn.backends.attention.flashinfer.kinds import Kind
from tests.backends.problems import LAYER, make

MIN_WORKSPACE = wrappers.MIN_WORKSPACE  # the real one: the fixture `fake` makes it smaller
F16 = torch.float16
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window_1": {"sliding_window": 1},
    "softcap": {"softcap": 1.5},
    "windowed_softcap": {"sliding_window": 5, "softcap": 1.5},
    "sinks": {"has_sinks": True},
    "windowed_sinks": {"sliding_window": 5, "has_sinks": True},
    "bidirectional": {"causal": False},
    "mha": {"num_kv_heads": 4},
    "gqa_4": {"num_q_heads": 8},
    "gqa_7": {"num_q_heads": 7, "num_kv_heads": 1},
    "gqa_7_sinks": {"num_q_heads": 14, "num_kv_heads": 2, "has_sinks": True},
}
MODES = {
    ForwardMode.EXTEND: [(0, 7), (0, 1), (9, 4)],
    ForwardMode.DECODE: [(1, 1), (15, 1), (16, 1), (30, 1)],
    ForwardMode.MIXED: [(17, 1), (0, 1), (6, 5), (33, 1), (0, 9)],
}
FRESH = [(0, 7), (0, 1), (0, 5)]
LEADING = [(5, 1), (8, 1), (3, 1), (7, 1), (0, 1), (4, 6), (0, 3)]


def spec_of(feature="plain", **changes):
    defaults = {"num_q_heads": 4, "num_kv_heads": 2, "qk_head_dim": 64, "v_head_dim": 64, "scale": 0.17, "kv_layer": LAYER}
    return AttentionSpec(**{**defaults, **FEATURES[feature], **changes})


def make_case(lengths, feature="plain", *, changes=None, dtype=F16, page_size=4, **options):
    return make(lengths, spec_of(feature, **(changes or {})), dtype=dtype, page_size=page_size, **options)


KIND = Kind.of(spec_of("gqa_4", qk_head_dim=128, v_head_dim=128, num_q_heads=32, num_kv_heads=8))


def shared_case(feature="plain", lengths=((40, 1), (33, 1), (32, 1)), page_size=16, **options):
    return make_case(list(lengths), feature, layout="shared", page_size=page_size, **options)


def graph_case(lengths, feature="plain", seed=0, pool=None):
    """A decode step in at least 4 rows; in `pool`, whose pages it overwrites, if one is given."""
    case = make_case(lengths, feature, seed=seed, extra_rows=max(0, 4 - len(lengths)))
    if pool is not None:
        pool.storage[: case.pool.storage.numel()].copy_(case.pool.storage)
        pool.key(LAYER)[0] = pool.value(LAYER)[0] = 0  # what the padded rows read
        case.pool = pool
    return case


class FakeEvent:
    """An event that the device reaches when told."""

    def __init__(self):
        self.reached, self.waits = True, 0

    def record(self, stream):
        assert stream == "stream"
        self.reached = False

    def query(self):
        return self.reached

    def synchronize(self):
        self.reached, self.waits = True, self.waits + 1
