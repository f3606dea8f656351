"""Rotary embeddings that follow the length of a call: refused on every road, as a long request would change short ones beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, Batch, BatchRequest, KVPool, SamplingParams, UnsupportedError, attention_layers, forward_context, patch
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.runners.model_runner import ModelRunner
from tests.oracle import greedy, random_prompts
from tests.tiny_models import LONG_ROPE, VOCAB, build
from tests.versions import newest_only

MOVES = r"a token at position 255 moves other tokens of its batch in .*set model\.config\.max_position_embeddings = {} on the loaded model"
PROMPTS = random_prompts((5, 20, 3))


def long_rope(original: int) -> dict[str, Any]:
    """And one layer: what moves its tokens moves those of the others."""
    return {**LONG_ROPE, "original_max_position_embeddings": original, "num_hidden_layers": 1}


@newest_only
@pytest.mark.parametrize("original", [24, 25, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_engine_refuses_a_long_rope_model_and_serves_it_up_to_the_length_that_it_names(dtype: torch.dtype, original: int) -> None:
    model = build("phi3", dtype=dtype, **long_rope(original))
    with pytest.raises(UnsupportedError, match=MOVES.format(original)):
        LLM(model, num_pages=64)
    expected = [greedy(model, prompt, 4) for prompt in PROMPTS]
    model.config.max_position_embeddings = original
    with LLM(model, num_pages=64) as llm:
        assert llm.engine.limits.max_positions == original
        found = [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_new_tokens=4))]
    assert found == expected or dtype is not torch.float32


@newest_only
def test_where_the_probe_prompts_are_longer_than_that_they_show_it() -> None:
    with pytest.raises(UnsupportedError, match=MOVES.format(12)):
        LLM(build("phi3", **long_rope(12)), num_pages=64)


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


@newest_only
def test_without_the_self_check_nothing_is_compared_and_a_long_request_does_change_a_short_one() -> None:
    """The negative control: what is refused above goes wrong."""
    model, params = build("phi3", **LONG_ROPE), SamplingParams(max_new_tokens=8)
    short, long = random_prompts((9, 90))
    for prompts in ([short], [short, long]):
        with LLM(model, num_pages=64, self_check=False, prefix_cache=False) as llm:
            found = llm.generate(prompts, params)[0].token_ids
        assert (found == greedy(model, short, 8)) == (len(prompts) == 1)


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
        ModelRunner(Follows(64, given), CompileOptions(inductor=False))


def test_a_composite_model_is_told_which_of_its_configs() -> None:
    text = config(original_max_position_embeddings=64)
    with pytest.raises(UnsupportedError, match=r"set model\.config\.get_text_config\(\)\.max_position_embeddings = 64"):
        ModelRunner(Follows(64, SimpleNamespace(get_text_config=lambda: text)), CompileOptions(inductor=False))


@pytest.mark.parametrize(("switch", "longest"), [(64, 64), (64, 25), (10**6, 256)])
def test_what_stays_the_same_within_the_models_positions_passes(switch: int, longest: int) -> None:
    model = Follows(switch, SimpleNamespace(max_position_embeddings=longest))
    assert ModelRunner(model, CompileOptions(inductor=False)).max_positions == longest


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
    with pytest.raises(UnsupportedError, match="can not run a token at position 255: IndexError: index out of range"):
        ModelRunner(model, CompileOptions(inductor=False))
