"""Where no state can be kept for a request, models with recurrent state are refused for that; `explain` shows it where it can."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor, nn

import paged_attn
from paged_attn import LLM, Batch, BatchRequest, KVPool, RecurrentStates, UnsupportedError
from tests.engine.models import make_llm
from tests.recurrent_models import recurrent

NAMES = ["falcon_h1", "lfm2", "mamba2"]
WORDS = r"keeps recurrent state in \S*layers\.0\.\w+ \(and \d more like it\), and {} has no place .*; "
COMPILED = WORDS.format(r"torch\.compile") + r"paged_attn\.RecurrentStates\(model, num_slots\), made before the model is called, has one"
HOOKED = WORDS.format(r"paged_attn\.patch") + r"only paged_attn\.LLM\(model\), which traces the model, has one"


@pytest.fixture(autouse=True)
def few_compiles() -> None:
    """Dynamo gives up a call of transformers after eight compiles, whichever models they were of."""
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2"])  # lfm2's short convolutions alone need no state where their reach is proved
def test_torch_compile_refuses_a_paged_batch(name: str) -> None:
    compiled = torch.compile(recurrent(name), backend="paged_attn")
    ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=ids).logits, recurrent(name)(input_ids=ids).logits)
    batch = Batch.build([BatchRequest([5, 6, 7], [1]), BatchRequest([8], [2])], 16)
    with paged_attn.forward_context(batch, KVPool([], 4, 16, torch.float32)):
        with pytest.raises(UnsupportedError, match=COMPILED):
            compiled(**batch.model_inputs())
    with pytest.raises(UnsupportedError, match=COMPILED):
        paged_attn.attention_layers(compiled)


def test_torch_compile_refuses_again_once_the_states_are_closed() -> None:
    compiled = torch.compile(recurrent("falcon_h1"), backend="paged_attn")
    states = RecurrentStates(recurrent("falcon_h1"), 4)
    assert paged_attn.attention_layers(compiled)
    states.close()
    with pytest.raises(UnsupportedError, match=COMPILED):
        paged_attn.attention_layers(compiled)


@pytest.mark.parametrize("name", NAMES)
def test_the_hook_refuses(name: str) -> None:
    with pytest.raises(UnsupportedError, match=HOOKED):
        with paged_attn.patch(recurrent(name)):
            pass


def test_explain_lists_the_layers() -> None:
    llm = make_llm(recurrent("lfm2"))
    text = paged_attn.explain(llm)
    assert "  2 recurrent layers  model.layers.{0,2}.conv\n    state      conv_states[0] 32x3 float32: 384 bytes per request" in text
    assert "by ops on the slots of its state (short_conv)" in text
    own = make_llm(recurrent("lfm2"), disable_passes=("scans",))
    assert "prompts chunk by chunk, decoding requests as one batch" in paged_attn.explain(own)
    assert "recurrent" not in paged_attn.explain(make_llm())


class SumsBeforeItsHead(nn.Module):
    """Keeps a sum of all tokens in its output's `state`, which no module inside it is given."""

    config = types.SimpleNamespace(use_cache=True)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 6), nn.Linear(6, 20)

    def forward(self, input_ids: Tensor, state: Tensor | None = None, use_cache: bool = False) -> types.SimpleNamespace:
        sums = self.embed(input_ids).cumsum(1) + (0 if state is None else state)
        return types.SimpleNamespace(logits=self.head(sums), state=sums[:, -1:] if use_cache else None)


def test_state_that_is_kept_otherwise_is_named() -> None:
    known = "states in the cache of transformers, in attributes, and those that a module is given and gives back"
    with pytest.raises(UnsupportedError, match=f"SumsBeforeItsHead keeps recurrent state in its output's state; known are {known}"):
        LLM(SumsBeforeItsHead().eval(), num_pages=20)
