"""`attention_layers` and `explain`: one compile for all batches, specs in order, refusals with reasons."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, Batch, BatchRequest, KVPool, UnsupportedError, attention_layers, explain, forward_context
from paged_attn.dynamo_backend import graphs_of
from paged_attn.passes.report import LayerReport
from paged_attn.report.explanation import break_words, equal_layers, ranges
from paged_attn.report.inspection import explanation
from tests.tiny_models import build


@pytest.fixture(autouse=True)
def no_compiles_of_other_tests() -> None:
    """Dynamo counts them by code object, and runs a model as it is from the ninth on: there would be no graph to explain."""
    torch._dynamo.reset()


class OneLayer(nn.Module):
    """A model of one attention; `stripes` gives it a mask of no known family."""

    def __init__(self, stripes: bool) -> None:
        super().__init__()
        self.stripes = stripes
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)[:, None]
        mask = None
        if self.stripes:
            i = torch.arange(input_ids.shape[1])
            mask = (i[:, None] * 3 + i[None] * 5) % 7 != 3
        return self.head(F.scaled_dot_product_attention(x, x, x, mask, is_causal=not self.stripes)[:, 0])


def run_batch(compiled: nn.Module, pool: KVPool, length: int) -> Tensor:
    batch = Batch.build([BatchRequest(range(length), [3, 1, 2]), BatchRequest([5, 6][: length % 2 + 1], [4])], pool.page_size)
    with torch.no_grad(), forward_context(batch, pool):
        logits: Tensor = compiled(**batch.model_inputs()).logits
    return logits


def test_tracing_and_batches_of_every_size_share_one_graph() -> None:
    model = build("gemma3_text")
    compiled = torch.compile(model, backend="paged_attn")
    layers = attention_layers(compiled)
    assert [spec.sliding_window for spec in layers] == [8, None, 8]
    pool = KVPool(layers, 5, 16, torch.float32)
    for length in (7, 1, 40):
        run_batch(compiled, pool, length)
    assert attention_layers(compiled) == layers == attention_layers(model)
    assert len(graphs_of(model)) == 1


def test_models_of_one_configuration_share_a_graph_and_each_finds_it() -> None:
    models = [build("qwen3", seed=seed, hidden_size=40) for seed in range(2)]
    layers = [attention_layers(torch.compile(model, backend="paged_attn")) for model in models]
    assert layers[0] == layers[1] and len(layers[0]) == 3
    assert [len(graphs_of(model)) for model in models] == [1, 1]


def test_the_model_itself_and_an_llm_give_the_same_layers() -> None:
    model = build("qwen3")
    llm = LLM(model, num_pages=4)
    assert attention_layers(model) == attention_layers(llm) == attention_layers(llm.engine)
    text = explain(llm)
    assert "Qwen3ForCausalLM: 3 attention layers rewritten" in text and "  layers 0-2  model.layers.{0-2}.self_attn\n" in text
    assert llm.engine.selection.describe() in text
    import paged_attn

    assert callable(paged_attn.explain), "no submodule may shadow the function"


def test_explain_says_how_each_layer_was_found_and_proved_and_what_is_not_paged() -> None:
    model = build("gemma3_text")
    compiled = torch.compile(model, backend="paged_attn")
    with torch.no_grad():
        compiled(input_ids=torch.ones(2, 5, dtype=torch.int64))
    text = explain(compiled)
    for words in (
        "layers 0, 2  model.layers.{0,2}.self_attn", "layer 1  model.layers.1.self_attn", "window 8", "F.sdpa", "mask evaluated on",
        "agrees with the config", "torch_native (first that fits every layer in the order for a CPU",
        "pieces       4 between 3 unified_attention, run as eager pieces", "prove_attention",
        "not paged    a graph of", "the call has input_ids of batch size",
    ):  # fmt: skip
        assert words in text, words
    assert explanation(compiled).backend == "torch_native"


def test_explain_says_what_passes_did_besides_paging() -> None:
    llm = LLM(build("llama"), num_pages=8, merge_linears=True)
    counts = llm.engine.runner.compiled.rewrite.counts
    moved, late = counts["early_logits_gather"], counts["late_views"]
    assert moved > 0 and late > 0
    words = (
        f"{moved} operations at the end compute the wanted rows only, 15 weights merged into 6, "
        f"3 pairs of parts go through the same operations as one, {late} views and copies are made later"
    )
    assert f"\n  besides      {words}\n" in explain(llm)
    assert "besides" not in explain(LLM(build("llama"), num_pages=8, early_logits_gather=False, disable_passes=("late_views",)))


def test_explain_counts_what_runs_between_the_pieces_by_name() -> None:
    mixtral = build("mixtral", num_hidden_layers=2)
    mixtral.set_experts_implementation("eager")  # they loop over their data, each layer's as one opaque module
    split_point = importlib.import_module("examples.moe_split_point").MoE().eval()
    for model, words, breaks in (
        (
            mixtral,
            "5 between 2 unified_attention, 2 module",
            ["paged_attn::unified_attention_with_output", "paged_attn::module_with_output"],
        ),
        (
            split_point,
            "9 between 4 unified_attention, 2 moe_example::experts, 2 moe_example::experts_into",
            ["paged_attn::unified_attention_with_output", "moe_example::experts", "moe_example::experts_into"],
        ),
    ):
        found = explanation(LLM(model, num_pages=8, disable_passes=("experts",)))
        assert f"\n  pieces       {words}, run as eager pieces\n" in found.text(), found.text()
        assert list(found.graphs[0].breaks) == breaks
    assert break_words({"paged_attn::recompute_attention_with_output": 1, "mylib::paged_attn_with_output": 2}) == (
        "1 recompute_attention, 2 mylib::paged_attn_with_output"
    )


class Backwards(OneLayer):
    """Its rows are numbered from the end."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(input_ids) * torch.arange(input_ids.shape[1]).flip(0)[:, None]


def test_a_call_that_can_not_be_paged_is_refused_with_its_reason_and_still_explained() -> None:
    compiled = torch.compile(Backwards(stripes=False), backend="paged_attn")
    with pytest.raises(UnsupportedError, match=r"Backwards cannot run paged batches: .* is made from the number of tokens"):
        attention_layers(compiled)
    text = explain(compiled)
    assert "nothing was rewritten" in text and "made from the number of tokens" in text and "none is needed" in text


def test_a_mask_that_can_not_be_proved_is_refused_as_it_is() -> None:
    with pytest.raises(UnsupportedError, match="cannot be proved"):
        attention_layers(torch.compile(OneLayer(stripes=True), backend="paged_attn"))


def test_models_of_other_backends_and_other_things_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="not compiled by paged_attn"):
        attention_layers(torch.compile(OneLayer(stripes=False), backend="eager"))
    with pytest.raises(TypeError, match="got str; allowed are"):
        attention_layers("model")  # type: ignore[arg-type]


def test_ranges_and_groups_collapse_only_equal_layers() -> None:
    assert [ranges(ids) for ids in ((), (3,), (0, 1, 2, 4), (1, 3, 4))] == ["", "3", "0-2, 4", "1, 3-4"]
    spec = attention_layers(build("llama"))[0]

    def report(layer_id: int, module: str, kv_layer: int) -> LayerReport:
        moved = type(spec)(**{**vars(spec), "module": module, "kv_layer": kv_layer})
        return LayerReport(layer_id, moved, "F.sdpa", "proof", "declared", "a", (0, 1, 2, 3), "b")

    groups = equal_layers([report(0, "h.0", 0), report(1, "h.1", 1), report(2, "x.y", 1), report(3, "h.3.z", 1), report(4, "h.4", 4)])
    assert [(g.title, g.modules) for g in groups] == [("layers 0-1, 4", "h.{0-1,4}"), ("layers 2-3", "x.y, h.3.z")]
    assert groups[1].spec.endswith("reads the KV of layer 1")


class LoopsOverTokens(OneLayer):
    def forward(self, idx: Tensor) -> Tensor:
        return torch.cat([super(LoopsOverTokens, self).forward(idx)[:, at : at + 4] for at in range(0, idx.shape[1], 4)], 1)


def test_a_length_that_becomes_a_constant_is_told_in_words() -> None:
    with pytest.raises(UnsupportedError, match=r"the number of tokens becomes a constant at .*test_explain\.py"):
        attention_layers(torch.compile(LoopsOverTokens(stripes=False), backend="paged_attn"))
