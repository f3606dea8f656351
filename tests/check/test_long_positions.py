"""What a request beside others changes by its length alone: refused on every road. The engine has another one for longrope (see
tests/engine/tracing/test_ropes_by_length.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, Batch, BatchRequest, KVPool, SamplingParams, UnsupportedError, attention_layers, forward_context, patch
from paged_attn.check.compare import long_positions
from paged_attn.check.runs.steps import ProbeSettings
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.passes import pass_list
from tests.oracle import random_prompts
from tests.tiny_models import LONG_ROPE, VOCAB, build
from tests.versions import newest_only

MOVES = r"a token at position 255 moves other tokens of its batch in .*set model\.config\.max_position_embeddings = {} on the loaded model"


def long_rope(original: int) -> dict[str, Any]:
    """And one layer: what moves its tokens moves those of the others."""
    return {**LONG_ROPE, "original_max_position_embeddings": original, "num_hidden_layers": 1}


@newest_only
def test_a_compiled_model_refuses_its_first_paged_batch() -> None:
    model = build("phi3", **LONG_ROPE)
    compiled = torch.compile(model, backend="paged_attn")
    pool, batch = KVPool(attention_layers(compiled), 8, 16, torch.float32), Batch.build([BatchRequest(range(9), [3])], 16)
    with torch.no_grad(), forward_context(batch, pool), pytest.raises(UnsupportedError, match=MOVES.format(64)):
        compiled(**batch.model_inputs())


@newest_only
def test_a_patched_model_is_refused_too() -> None:
    model = build("phi3", **LONG_ROPE)
    with pytest.raises(UnsupportedError, match=MOVES.format(64)), patch(model):
        pass
    model.config.max_position_embeddings = 64
    with patch(model):
        pass


class Follows(nn.Module):
    """One layer of attention over tokens that are moved by their position, twice as far beyond position `switch` of a call."""

    def __init__(self, switch: int, config: Any = None, positions: int = 300) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.switch = switch
        self.config = SimpleNamespace(max_position_embeddings=256) if config is None else config
        self.embed, self.table = nn.Embedding(VOCAB, 16), nn.Embedding(positions, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        far = torch.where(position_ids.max() < self.switch, 1.0, 2.0)
        x = self.embed(input_ids) + far * self.table(position_ids)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        logits: Tensor = self.head(x + attended)
        return logits


def config(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(max_position_embeddings=256, **more)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (config(), r"can be served\.$"),
        (config(original_max_position_embeddings=64), r"Here that is 64: set model\.config\.max_position_embeddings = 64"),
        (config(rope_parameters={"full": {"original_max_position_embeddings": 64}, "local": {}}), r"Here that is 64: set model"),
        (config(rope_parameters=None, original_max_position_embeddings=65), r"can be served\.$"),
        (config(original_max_position_embeddings=300), r"can be served\.$"),
        (config(original_max_position_embeddings=8), r"Here that is 8: set model"),
    ],
)
def test_the_message_says_what_to_set_only_where_that_was_seen_to_help(given: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"a token at position 255 moves other tokens of its batch in .*{words}"):
        TracedRunner(Follows(64, given), CompileOptions(inductor=False))


def test_a_composite_model_is_told_which_of_its_configs() -> None:
    text = config(original_max_position_embeddings=64)
    with pytest.raises(UnsupportedError, match=r"set model\.config\.get_text_config\(\)\.max_position_embeddings = 64"):
        TracedRunner(Follows(64, SimpleNamespace(get_text_config=lambda: text)), CompileOptions(inductor=False))


def test_without_the_self_check_the_proof_refuses_it() -> None:
    words = r"the model's forward: max_1 mixes tokens, .*with max_position_embeddings at most the length"
    with pytest.raises(UnsupportedError, match=words):
        LLM(Follows(64).eval(), num_pages=64, self_check=False)
    compiled = torch.compile(Follows(64).eval(), backend="paged_attn", options={"self_check": False})
    pool, batch = KVPool(attention_layers(compiled), 8, 16, torch.float32), Batch.build([BatchRequest(range(9), [3])], 16)
    with torch.no_grad(), forward_context(batch, pool), pytest.raises(UnsupportedError, match=words):
        compiled(**{name: value for name, value in batch.model_inputs().items() if name != "use_cache"})


def test_a_long_request_does_change_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what is refused above goes wrong."""
    monkeypatch.setattr(pass_list, "check_independent_rows", lambda *_: "not looked at")
    model, params = Follows(64).eval(), SamplingParams(max_new_tokens=8)
    short, long = random_prompts((9, 90))
    expected = list(short)
    with torch.no_grad():
        while len(expected) < len(short) + 8:
            expected.append(int(model(torch.tensor([expected]), torch.arange(len(expected))[None])[0, -1].argmax()))
    for prompts in ([short], [short, long]):
        with LLM(model, num_pages=64, self_check=False, prefix_cache=False) as llm:
            found = llm.generate(prompts, params)[0].token_ids
        assert (found == expected[len(short) :]) == (len(prompts) == 1)


@pytest.mark.parametrize(("switch", "longest"), [(64, 64), (64, 25), (10**6, 256)])
def test_what_stays_the_same_within_the_models_positions_passes(switch: int, longest: int) -> None:
    model = Follows(switch, SimpleNamespace(max_position_embeddings=longest))
    assert TracedRunner(model, CompileOptions(inductor=False)).max_positions == longest


def test_a_model_that_can_not_be_called_at_its_last_position_is_refused_in_words() -> None:
    """Its config states more positions than its table has, which the passes do not see: it is looked up by data."""

    class Lies(Follows):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            rows = self.table.weight.index_select(0, position_ids[0] + 0 * input_ids[0])
            x = self.embed(input_ids) + rows
            q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
            logits: Tensor = self.head(x + attended)
            return logits

    model = Lies(10**6, SimpleNamespace(max_position_embeddings=256), positions=200)
    with pytest.raises(UnsupportedError, match="cannot run a token at position 255: IndexError: index out of range"):
        TracedRunner(model, CompileOptions(inductor=False))


@pytest.mark.parametrize("moves_here", [False, True])
@pytest.mark.parametrize("moves_there", [False, True])
def test_ranks_of_a_sharded_model_refuse_together_after_equally_many_runs(
    moves_here: bool, moves_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run holds collectives, in which one rank alone would wait for ever."""
    positions: list[int] = []
    monkeypatch.setattr(long_positions, "_seen", lambda served, truth, position: positions.append(position))
    monkeypatch.setattr(long_positions, "_first_move", lambda *_: ("the model", 0.5, 0.1) if moves_here else None)
    ranks: Any = SimpleNamespace(any_says=lambda yes: yes or moves_there, rank=0, size=2)
    served: Any = SimpleNamespace(settings=ProbeSettings(ranks=ranks))
    truth: Any = SimpleNamespace(prompts=[range(5)])
    model = build("phi3", **long_rope(24))
    if moves_here or moves_there:
        with pytest.raises(UnsupportedError, match="at position 255 moves" if moves_here else "on another rank"):
            long_positions.check_long_positions(served, truth, 256, model)
    else:
        long_positions.check_long_positions(served, truth, 256, model)
    assert positions == [5, 255]
