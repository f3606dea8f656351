"""The oracle itself, against F.scaled_dot_product_attention on each request's dense keys and values."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from paged_attn.backends.attention.reference import ReferenceBackend
from tests.backends.problems import FEATURES, LAYER, LAYOUTS, Case, close, make, run, spec_of

LENGTHS = [(0, 5), (13, 1), (9, 6), (0, 1), (20, 2)]
MUST_MOVE = 1e-3  # negative controls: without the feature, some output differs by more


def dense_scores(case: Case, request: int) -> torch.Tensor:
    """Scores [heads, queries, keys] in float64, written with index grids rather than per query."""
    spec, keys = case.spec, case.dense_keys[request].double()
    length, new = case.batch.seq_lens_host[request], case.batch.query_lens_host[request]
    query = case.query[case.rows(request)].double()
    scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(spec.group_size, 1)) * spec.scale
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    i = torch.arange(length)[length - new :, None]
    j = torch.arange(length)[None, :]
    if spec.alibi_slopes:
        scores = scores + torch.tensor(spec.alibi_slopes).double()[:, None, None] * (j - i)
    if case.bias is not None:
        places = j.expand(new, length) if spec.bias_index == "key" else (i - j).clamp(0, case.bias.shape[1] - 1)
        scores = scores + case.bias.double()[:, places]
    hidden = torch.zeros(new, length, dtype=torch.bool)
    if spec.causal:
        hidden |= j > i
    if spec.sliding_window:
        hidden |= (i - j) >= spec.sliding_window
    if spec.chunk:
        hidden |= torch.div(i, spec.chunk, rounding_mode="floor") != torch.div(j, spec.chunk, rounding_mode="floor")
    return scores.masked_fill(hidden, -math.inf)


def dense_attention(case: Case, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """SDPA over zero queries with the scores as its additive mask; sinks are one more key of zeros whose value is zero."""
    scores = dense_scores(case, request)
    values = case.dense_values[request].double().repeat_interleave(case.spec.group_size, 1).transpose(0, 1)
    if case.sinks is not None:
        scores = torch.cat([scores, case.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        values = F.pad(values, (0, 0, 0, 1))
    zeros = torch.zeros(scores.shape[0], scores.shape[1], 1, dtype=torch.float64)
    output = F.scaled_dot_product_attention(zeros, zeros.new_zeros(scores.shape[0], scores.shape[2], 1), values, attn_mask=scores)
    return output.transpose(0, 1), torch.logsumexp(scores, -1).T


@pytest.mark.parametrize("feature", FEATURES)
def test_equals_dense_attention(feature):
    case = make(LENGTHS, spec_of(feature), page_size=4, extra_rows=3)
    output, lse = run(case, ReferenceBackend(), lse=True)
    for request in range(len(LENGTHS)):
        expected, expected_lse = dense_attention(case, request)
        close(output[case.rows(request)], expected)
        close(lse[case.rows(request)], expected_lse)
    padding = slice(case.batch.num_tokens, None)
    assert output[padding].shape[0] == 3
    assert not output[padding].any() and not lse[padding].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_equals_sdpas_own_causal_mask(layout, page_size):
    """Nothing of ours but the layout: SDPA makes the mask itself, so whole prompts only; F.sdpa also scales and groups heads."""
    case = make([(0, 17), (0, 64), (0, 1)], page_size=page_size, layout=layout)
    output, _ = run(case, ReferenceBackend())
    for request in range(3):
        q, k, v = (t.transpose(0, 1)[None] for t in (case.query[case.rows(request)], case.dense_keys[request], case.dense_values[request]))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=case.spec.scale, enable_gqa=True)
        close(output[case.rows(request)], expected[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("feature", "without"),
    [
        ("window", {"sliding_window": None}),
        ("window", {"sliding_window": 6}),
        ("window", {"sliding_window": 4}),
        ("chunk", {"chunk": None}),
        ("chunk", {"chunk": 7}),
        ("softcap", {"softcap": None}),
        ("alibi", {"alibi_slopes": None}),
        ("bidirectional", {"causal": True}),
        ("bidirectional_chunk", {"chunk": None}),
        ("bidirectional_window", {"sliding_window": None}),
        ("plain", {"scale": 0.4}),
    ],
)
def test_each_feature_is_seen_by_these_cases(feature, without):
    """Negative control: were the feature dropped, or off by one, these cases would notice."""
    case = make(LENGTHS, spec_of(feature), page_size=4)
    output, _ = run(case, ReferenceBackend())
    changed = dataclasses.replace(case.spec, **without)
    case.pool.layers = (case.pool.layers[0], changed, case.pool.layers[2])
    other, _ = run(case, ReferenceBackend())
    assert (output - other).abs().max() > MUST_MOVE


def test_sinks_move_the_output():
    case = make(LENGTHS, spec_of("sinks"), page_size=4)
    output, _ = run(case, ReferenceBackend())
    case.sinks = None
    assert (output - run(case, ReferenceBackend())[0]).abs().max() > MUST_MOVE


@pytest.mark.parametrize("feature", ["bias_by_distance", "bias_by_key", "windowed_bias"])
def test_biases_move_the_output(feature):
    case = make(LENGTHS, spec_of(feature), page_size=4)
    output, _ = run(case, ReferenceBackend())
    case.bias = None
    assert (output - run(case, ReferenceBackend())[0]).abs().max() > MUST_MOVE


def test_computes_in_float32_whatever_the_dtype():
    case = make([(6, 3)], dtype=torch.bfloat16)
    output, lse = run(case, ReferenceBackend(), lse=True)
    expected, expected_lse = dense_attention(case, 0)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output[:3], expected.float().bfloat16())
    close(lse[:3], expected_lse)


def test_stored_rows_are_the_dense_ones():
    case = make([(3, 6)], page_size=4)
    run(case, ReferenceBackend())
    pages = case.batch.page_table[0].long()
    close(case.pool.key(LAYER)[pages].flatten(0, 1)[:9], case.dense_keys[0])
    close(case.pool.value(LAYER)[pages].flatten(0, 1)[:9], case.dense_values[0])
    assert case.pool.key(LAYER)[pages].flatten(0, 1)[9:].isnan().all()
