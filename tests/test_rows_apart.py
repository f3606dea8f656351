"""Rotary embeddings that follow the length of a call: refused on every road, as a long request would change short ones beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paged_attn import LLM, Batch, BatchRequest, KVPool, SamplingParams, UnsupportedError, attention_layers, forward_context
from paged_attn.engine.model_runner import ModelRunner
from paged_attn.options import CompileOptions
from paged_attn.rows_apart import check_rows_apart
from tests.oracle import greedy, random_prompts
from tests.tiny_models import LONG_ROPE, VOCAB, build
from tests.versions import newest_only

MOVES = (
    r"a token at position 255 moves the logits .* in Phi3ForCausalLM .*set model\.config\.max_position_embeddings = 64 on the loaded model"
)
PROMPTS = random_prompts((5, 20, 3))


@newest_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_refuses_a_long_rope_model_and_serves_it_up_to_the_length_that_it_names(dtype: torch.dtype) -> None:
    model = build("phi3", dtype=dtype, **LONG_ROPE)
    with pytest.raises(UnsupportedError, match=MOVES):
        LLM(model, num_pages=64)
    expected = [greedy(model, prompt, 6) for prompt in PROMPTS]
    model.config.max_position_embeddings = 64
    with LLM(model, num_pages=64) as llm:
        assert llm.engine.limits.max_positions == 64
        assert [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_new_tokens=6))] == expected


@newest_only
def test_a_compiled_model_refuses_its_first_paged_batch() -> None:
    model = build("phi3", **LONG_ROPE)
    compiled = torch.compile(model, backend="paged_attn")
    pool, batch = KVPool(attention_layers(compiled), 8, 16, torch.float32), Batch.build([BatchRequest(range(9), [3])], 16)
    with torch.no_grad(), forward_context(batch, pool), pytest.raises(UnsupportedError, match=MOVES):
        compiled(**batch.model_inputs())


@newest_only
def test_without_the_self_check_nothing_is_compared_and_a_long_request_does_change_a_short_one() -> None:
    """The negative control: what is refused above goes wrong."""
    model, params = build("phi3", **LONG_ROPE), SamplingParams(max_new_tokens=8)
    short, long = random_prompts((9, 90))
    alone, beside = (LLM(model, num_pages=64, self_check=False, prefix_cache=False) for _ in range(2))
    assert alone.generate([short], params)[0].token_ids == greedy(model, short, 8)
    assert beside.generate([short, long], params)[0].token_ids != greedy(model, short, 8)


class Rotary(nn.Module):
    """Logits that follow the position, and, beyond position `switch`, the largest one of the call. It counts its calls."""

    def __init__(self, switch: int, config: Any = None) -> None:
        super().__init__()
        self.switch, self.config, self.calls = switch, config, list[int]()
        self.table = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(0))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        self.calls.append(int(positions[-1]))
        return self.table[ids] + positions[:, None] * (1e-2 if positions[-1] < self.switch else 2e-2)


IDS = torch.arange(24) % 5 + 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, r"can be served\.$"),
        (SimpleNamespace(original_max_position_embeddings=64), "Here that is 64: set model.config.max_position_embeddings = 64"),
        (SimpleNamespace(rope_parameters={"full": {"original_max_position_embeddings": 64}, "local": {}}), "Here that is 64: set model"),
        (SimpleNamespace(rope_parameters=None, original_max_position_embeddings=65), r"can be served\.$"),
        (SimpleNamespace(original_max_position_embeddings=300), r"can be served\.$"),
        (SimpleNamespace(original_max_position_embeddings=8), r"can be served\.$"),
    ],
)
def test_the_message_says_what_to_set_only_where_that_was_seen_to_help(config: Any, words: str) -> None:
    model = Rotary(64, config)
    with pytest.raises(UnsupportedError, match=rf"a token at position 255 moves .* in Rotary by .*{words}"):
        check_rows_apart(model, IDS, 256, model)


def test_a_composite_model_is_told_which_of_its_configs() -> None:
    text = SimpleNamespace(original_max_position_embeddings=64)
    model = Rotary(64, SimpleNamespace(get_text_config=lambda: text))
    with pytest.raises(UnsupportedError, match=r"set model\.config\.get_text_config\(\)\.max_position_embeddings = 64"):
        check_rows_apart(model, IDS, 256, model)


@pytest.mark.parametrize(
    ("switch", "longest", "calls"), [(64, 64, [63, 24, 25]), (64, 25, []), (64, None, []), (10**6, 256, [255, 24, 25])]
)
def test_what_stays_the_same_within_the_models_positions_passes(switch: int, longest: int | None, calls: list[int]) -> None:
    model = Rotary(switch)
    check_rows_apart(model, IDS, longest, model)
    assert model.calls == calls


def test_a_model_without_position_ids_is_not_called_with_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its positions are the batch's own, which was proved."""
    calls: list[object] = []
    monkeypatch.setattr("paged_attn.engine.model_runner.check_rows_apart", lambda *args: calls.append(args))
    model = build("opt")

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, idx: Tensor) -> Tensor:
            logits: Tensor = self.model(input_ids=idx, use_cache=False).logits
            return logits

    ModelRunner(Plain(), CompileOptions(inductor=False))
    assert not calls
    ModelRunner(model, CompileOptions(inductor=False))
    assert len(calls) == 1


def test_a_model_that_can_not_be_called_at_its_last_position_is_refused_in_words() -> None:
    class Lies(nn.Module):
        """Its config states more positions than its table has, which no trace can show: the table is looked up by data."""

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(max_position_embeddings=64)
            self.table, self.model = nn.Embedding(40, 32), build("llama").model
            self.head = nn.Linear(32, VOCAB)

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            x = self.model.embed_tokens(input_ids) + self.table(position_ids)
            out: Tensor = self.head(self.model(inputs_embeds=x, position_ids=position_ids, use_cache=False).last_hidden_state)
            return out

    runner = object.__new__(ModelRunner)
    runner.model = Lies()
    with pytest.raises(UnsupportedError, match="24 token ids of which the last is at position 63: IndexError"):
        check_rows_apart(runner._logits_at, IDS, 64, runner.model)
