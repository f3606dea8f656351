"""A model is served only if it returns logits over its tokens, a row for each; otherwise it is refused by what it returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams, UnsupportedError
from tests.engine.runners.own_positions import PLACES, POSITIONS, VOCAB, Decoder, greedy_loop
from tests.oracle import random_prompts
from tests.tiny_models import config_for


def hf(auto: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, auto).from_config(config_for("qwen3")).eval()
    return model


class Returning(Decoder):
    """The decoder's logits [1, T, 96] go through `change`."""

    def __init__(self, change: Any) -> None:
        super().__init__(PLACES["learned"][0])
        self.change = change

    def forward(self, idx: Tensor) -> Any:  # type: ignore[override]
        return self.change(super().forward(idx)[0])


REFUSED = {
    "no head": (lambda: hf("AutoModel"), r"Qwen3Model returns a BaseModelOutputWithPast of last_hidden_state.*, and no logits"),
    "classes of tokens": (lambda: hf("AutoModelForTokenClassification"), r"returns 2 numbers for each token and reads 96 token ids"),
    "classes of texts": (lambda: hf("AutoModelForSequenceClassification"), r"of shape \[1, 2\] .*: numbers for the whole sequence"),
    "hidden states": (lambda: Returning(lambda logits: logits[..., :16]), r"returns 16 numbers for each token and reads 96 token ids"),
    "rows of its own": (lambda: Returning(lambda logits: torch.cat([logits[:, :4], logits], 1)), r"it puts 4 rows of its own among"),
    "two dims": (lambda: Returning(lambda logits: logits[0]), r"of shape \[5, 96\] for token ids \[1, 5\]"),
    "nothing": (lambda: Returning(lambda logits: None), "returns a NoneType, and no logits"),
}


HOOKED = ("no head", "classes of tokens", "classes of texts")  # a hook takes models of transformers alone


@pytest.mark.parametrize(("name", "compiled"), [*((name, True) for name in REFUSED), *((name, False) for name in HOOKED)])
def test_what_is_no_row_of_logits_for_each_token_is_refused(name: str, compiled: bool) -> None:
    model, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=words) as told:
        LLM(model(), task="generate", num_pages=20, compile=compiled)
    assert "logits_to_keep" not in str(told.value)


class Generates(Returning):
    """Over fewer tokens than it reads, which it says."""

    def can_generate(self) -> bool:
        return True


ACCEPTED: dict[str, Any] = {
    "says that it generates": Generates(lambda logits: logits[..., : VOCAB - 8]),
    "a dict": Returning(lambda logits: {"loss": None, "logits": logits}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted(name: str) -> None:
    model, prompts = ACCEPTED[name].eval(), random_prompts((1, 5, 17))

    class Plain(nn.Module):
        def forward(self, idx: Tensor) -> Tensor:
            logits: Any = model(idx)
            return logits["logits"] if isinstance(logits, dict) else logits

    with LLM(model, page_size=4, num_pages=40, max_batch_tokens=16) as llm:
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=6))]
    assert got == [greedy_loop(Plain(), prompt, 6) for prompt in prompts]


def test_a_config_that_states_minus_one_positions_states_no_limit() -> None:
    model = Returning(lambda logits: logits).eval()
    model.config = SimpleNamespace(max_position_embeddings=-1)  # XLNet's
    with LLM(model, page_size=4, num_pages=40) as llm:
        assert llm.engine.limits.max_positions == POSITIONS  # those of its table


class Failing(Returning):
    def __init__(self, error: Exception) -> None:
        super().__init__(lambda logits: logits)
        self.error = error

    def forward(self, idx: Tensor) -> Tensor:  # type: ignore[override]
        raise self.error


# Of a branch for which a config has no case, in transformers' DeepSeek-V2: the name was never bound.
@pytest.mark.parametrize(
    "error", [AttributeError("no such table"), UnboundLocalError("weights"), KeyError("method"), ZeroDivisionError("zero")]
)
def test_a_model_that_can_not_be_called_itself_is_named(error: Exception) -> None:
    with pytest.raises(UnsupportedError, match=f"Failing itself cannot be called on 5 token ids: {type(error).__name__}: "):
        LLM(Failing(error).eval(), num_pages=20)


@pytest.mark.parametrize("ids", [2, 3, 5])
def test_a_model_of_few_token_ids_is_served(ids: int) -> None:
    """Four nucleotides and a gap, say."""
    torch.manual_seed(0)
    config = config_for("llama", vocab_size=ids, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    prompts = [[number % ids for number in prompt] for prompt in random_prompts((7, 1), seed=3)]
    with LLM(model, num_pages=40) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=6))
    assert [output.token_ids for output in outputs] == [greedy_loop(model, prompt, 6) for prompt in prompts]


def test_embeddings_that_are_renormalised_whenever_they_are_read() -> None:
    model = Decoder(PLACES["none"][0]).eval()
    model.embed.max_norm = 3.0
    with pytest.raises(UnsupportedError, match=r"embed writes its weights whenever it is called \(max_norm=3\).*embedding_renorm_"):
        LLM(model, num_pages=40)
    prompt = list(range(2, 42))
    expected = greedy_loop(model, prompt, 6)
    with torch.no_grad():
        torch.embedding_renorm_(model.embed.weight, torch.arange(VOCAB), model.embed.max_norm, model.embed.norm_type)
    model.embed.max_norm = None
    with LLM(model, num_pages=40, max_batch_tokens=16) as llm:
        assert llm.generate([prompt], SamplingParams(max_new_tokens=6))[0].token_ids == expected
