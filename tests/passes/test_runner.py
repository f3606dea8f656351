"""Every architecture: one rewrite per layer, nothing of the old attention left, and the specs that its config promises."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.ops.positions import BATCH_POSITIONS
from paged_attn.passes.find.sdpa import TARGETS
from paged_attn.passes.fx.graph_tools import depends_on, value_of
from paged_attn.passes.pass_list import PASSES
from paged_attn.passes.report import Rewrite
from paged_attn.passes.runner import rewrite
from tests.passes.graphs import Toy, Traced, assert_ragged_equals_alone, masked, ragged_error, rewrite_of, trace
from tests.tiny_models import ARCHITECTURES, VOCAB, build


@cache
def rewritten(name: str) -> tuple[Rewrite, int, float, list[str], float]:
    """The rewrite, the model's layers, seconds, names of nodes that are [T, T], and the error on ragged prompts."""
    model = build(name)

    def work(traced: Traced) -> tuple[Rewrite, float, list[str], float]:
        result = rewrite(traced.gm, traced.args, model)
        assert result.gm is not None, result.not_paged
        tokens = result.form.num_tokens
        square = [node.name for node in result.gm.graph.nodes if is_square(node, tokens)]
        before = [node.name for node in traced.gm.graph.nodes if is_square(node, tokens)]
        assert before or not any(node.kwargs.get("attn_mask") for node in traced.gm.graph.nodes)
        return result, sum(result.seconds.values()), square, ragged_error(model, result, traced.args, (5, 24, 13), VOCAB)

    result, seconds, square, error = trace(model, work, vocabulary=VOCAB, use_cache=False).result
    return result, model.config.num_hidden_layers, seconds, square, error


def is_square(node: torch.fx.Node, tokens: Any) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.dim() >= 2 and all(depends_on(size, tokens) for size in value.shape[-2:])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_rewrite_per_layer_and_nothing_of_the_old_is_left(name: str) -> None:
    result, layers, seconds, square, _ = rewritten(name)
    assert result.gm is not None
    nodes = list(result.gm.graph.nodes)
    assert len(result.layers) == layers == 3
    assert sum(node.target is UNIFIED_ATTENTION for node in nodes) == layers
    assert not [node for node in nodes if node.target in TARGETS]
    assert square == []
    assert (result.nodes_after, result.not_paged) == (len(nodes), "")
    assert result.nodes_after < result.nodes_before + 12 * layers
    assert seconds < 5 and list(result.seconds) == [each.name for each in PASSES if not each.optional]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ragged_prompts_have_the_logits_that_they_have_alone(name: str) -> None:
    assert rewritten(name)[-1] < 2e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_reports_hold_what_explain_prints(name: str) -> None:
    result, *_ = rewritten(name)
    assert result.gm is not None
    ops = {node.name: node for node in result.gm.graph.nodes if node.target is UNIFIED_ATTENTION}
    assert result.specs == tuple(report.spec for report in result.layers)
    for index, report in enumerate(result.layers):
        assert report.layer_id == index == report.spec.kv_layer == ops[report.op_node].args[4]
        assert ops[report.op_node].args[5] is True  # it writes its KV
        assert report.found_by == "F.sdpa" and report.original_node not in ops
        assert "probes = causal" in report.proof or (name == "opt" and report.proof == "no mask, is_causal=True")
        assert report.declared.startswith("agrees with the config: ")
        assert str(index) in report.spec.module.split(".")


PLAIN = {"num_q_heads": 4, "num_kv_heads": 2, "qk_head_dim": 8, "v_head_dim": 8, "causal": True, "scale": 8**-0.5}
EXPECTED: dict[str, dict[str, Any]] = {
    "llama": {**PLAIN, "sliding_window": [None] * 3, "chunk": [None] * 3},
    "mistral": {**PLAIN, "sliding_window": [8, 8, 8]},
    "gemma3_text": {**PLAIN, "sliding_window": [8, None, 8]},
    "cohere2": {**PLAIN, "sliding_window": [8, None, 8]},
    "qwen2": {**PLAIN, "sliding_window": [None, 8, 8]},
    "llama4_text": {**PLAIN, "chunk": [8, 8, None], "sliding_window": [None] * 3},
    "deepseek_v3": {"qk_head_dim": 24, "v_head_dim": 16, "num_kv_heads": 4, "scale": 24**-0.5},
    "falcon": PLAIN,
    "granite": {**PLAIN, "scale": 0.25},
    "opt": {"num_q_heads": 4, "num_kv_heads": 4, "scale": 1.0},  # scales its queries itself
    "gpt2": {"num_q_heads": 4, "num_kv_heads": 4, "scale": 8**-0.5},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_specs(name: str) -> None:
    specs = rewritten(name)[0].specs
    for field, expected in EXPECTED[name].items():
        got = [getattr(spec, field) for spec in specs]
        assert got == (expected if isinstance(expected, list) else [pytest.approx(expected)] * 3), field


@pytest.mark.parametrize(
    ("name", "changes", "field", "expected"),
    [
        ("mistral", {"sliding_window": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}, "sliding_window", [4096] * 3),
        ("llama4_text", {"attention_chunk_size": 8192, "num_attention_heads": 40, "num_key_value_heads": 8}, "chunk", [8192, 8192, None]),
        ("phi3", {"sliding_window": 262144}, "sliding_window", [262144] * 3),
    ],
)
def test_windows_and_chunks_of_real_size(name: str, changes: dict[str, Any], field: str, expected: list[int | None]) -> None:
    model = build(name, **changes)
    result = rewrite_of(model, model, vocabulary=VOCAB, use_cache=False)
    assert [getattr(spec, field) for spec in result.specs] == expected
    assert [spec.num_kv_heads for spec in result.specs] == [changes.get("num_key_value_heads", 2)] * 3


def test_only_llama_4_counts_positions_outside_its_masks() -> None:
    assert {name: rewritten(name)[0].positions_redirected for name in ("llama", "llama4_text", "mixtral", "opt")} == {
        "llama": 0, "llama4_text": 1, "mixtral": 0, "opt": 0,
    }  # fmt: skip


def test_the_original_graph_is_left_as_it_was() -> None:
    def work(traced: Traced) -> tuple[str, str]:
        before = str(traced.gm.graph)
        rewrite(traced.gm, traced.args, None)
        return before, str(traced.gm.graph)

    before, after = trace(masked(lambda ids, pos: None, is_causal=True), work).result
    assert before == after


def test_the_op_gets_views_and_only_aten_overloads_are_added() -> None:
    result = rewritten("llama")[0]
    assert result.gm is not None
    op = next(node for node in result.gm.graph.nodes if node.target is UNIFIED_ATTENTION)
    pending, added = [op], set()
    while pending:
        node = pending.pop()
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node not in added:
            added.add(node)
            pending += node.all_input_nodes
    names = {str(node.target) for node in added - {op}}
    assert names <= {"aten.select.int", "aten.permute.default", "aten.new_empty.default", "aten.sym_size.int", "aten.slice.Tensor"}
    assert len(op.users) == 0


def test_a_call_that_is_not_paged_still_refuses_a_mask_of_no_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo, "mark_dynamic", lambda tensor, dim: None)

    def dilated(ids: Tensor, pos: Tensor) -> Tensor:
        q, k = pos[0][:, None], pos[0][None, :]
        return (q - k) % 2 == 0

    with pytest.raises(UnsupportedError, match=r"layer at attend: .*on the 12 tokens of this call"):
        rewrite_of(masked(dilated))
    result = rewrite_of(masked(lambda ids, pos: torch.ones(12, 12, dtype=torch.bool).tril()))
    assert result.gm is None and "fixed length" in result.not_paged


class NoPositions(Toy):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).unflatten(-1, (4, 8)).transpose(1, 2)
        return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).flatten(2))


def test_a_model_without_positions_is_paged_and_asks_for_none() -> None:
    result = assert_ragged_equals_alone(NoPositions(lambda q, k, v, ids, pos: q))
    assert result.gm is not None and result.form.positions is None
    assert not any(node.target is BATCH_POSITIONS for node in result.gm.graph.nodes)


class CountsItself(Toy):
    """What is made from row numbers cannot be proved here, but the model might be called with positions."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return super().forward(input_ids, torch.arange(input_ids.shape[1]).flip(0)[None])


def test_rows_that_are_no_positions_make_a_call_without_positions_unpaged_and_not_the_model_refused() -> None:
    result = rewrite_of(CountsItself(lambda q, k, v, ids, pos: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))
    assert result.gm is None and not result.layers and "made from the number of tokens" in result.not_paged


def test_a_part_of_a_model_without_attention_is_not_paged() -> None:
    class Part(Toy):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return self.head(self.embed(input_ids))

    assert "no attention" in rewrite_of(Part(lambda q, k, v, ids, pos: q)).not_paged
