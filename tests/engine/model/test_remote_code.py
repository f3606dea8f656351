"""Models that compute as files of remote code do, token for token: ragged, in chunks, with small and large pages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.specs.recompute import RecomputeSpec
from tests.engine.model import remote_code
from tests.engine.model.remote_code import Causal
from tests.engine.runners.own_positions import greedy_loop
from tests.oracle import random_prompts

PROMPTS = random_prompts((1, 5, 17, 33, 70))
GREEDY = SamplingParams(max_new_tokens=8)
KINDS = ("SlicedRotary", "GrownSlicedRotary", "GrowingRotary", "UninitialisedScores", "SdpaByLength", "ConvolvedKeys")


def made(name: str) -> Causal:
    model: Causal = getattr(remote_code, name)().eval()
    return model


def expected(name: str) -> list[list[int]]:
    return [greedy_loop(made(name), prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_the_model(name: str) -> None:
    model = made(name)
    for page_size in (1, 16):
        with LLM(model, page_size=page_size, num_pages=400, max_batch_tokens=16) as llm:
            assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected(name), f"page size {page_size}"


def test_attention_over_keys_that_are_mixed_with_those_before_stays_on_pages() -> None:
    with LLM(made("ConvolvedKeys"), num_pages=40) as llm:
        specs = [layer.spec for layer in llm.engine.runner.compiled.rewrite.layers]
    assert [spec.sliding_window for spec in specs if not isinstance(spec, RecomputeSpec)] == [8, 8]
    assert [spec.reach for spec in specs if isinstance(spec, RecomputeSpec)] == [1, 1, 1, 1]


def test_a_wrapper_is_called_as_what_it_wraps() -> None:
    """Whose token ids are not called input_ids, and who takes no position_ids."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made("SlicedRotary")

        def forward(self, idx: torch.Tensor) -> torch.Tensor:
            return self.inner(idx)

    for model in (nn.DataParallel(Named()), nn.DataParallel(nn.DataParallel(made("SlicedRotary")))):
        with LLM(model.eval(), num_pages=40, max_batch_tokens=16) as llm:
            assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected("SlicedRotary")


@pytest.mark.parametrize("tokens", [3, 20])
def test_a_table_that_earlier_calls_have_grown_is_no_limit(tokens: int) -> None:
    model = made("GrowingRotary")
    model(torch.arange(tokens)[None])
    with LLM(model, num_pages=40, max_batch_tokens=16) as llm:
        assert llm.engine.limits.max_positions == remote_code.POSITIONS  # of the buffer that holds its mask
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected("GrowingRotary")


def test_a_sliced_table_in_a_model_that_states_its_positions() -> None:
    model = made("SlicedRotary")
    model.config = SimpleNamespace(max_position_embeddings=remote_code.POSITIONS)  # type: ignore[assignment]
    with LLM(model, num_pages=40, max_batch_tokens=16) as llm:
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected("SlicedRotary")


def test_an_indexer_of_blocks_by_position() -> None:
    from tests.zoo.build import build
    from tests.zoo.oracle import generate

    sparse = {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2}
    model = build("minimax_m3_vl_text", index_block_size=4, index_topk_blocks=2, **sparse)
    with LLM(model, num_pages=40, max_batch_tokens=16) as llm:
        got = [c.token_ids for c in llm.generate(PROMPTS[:4], SamplingParams(max_new_tokens=8, ignore_eos=True))]
    assert got == [generate(model, prompt, 8) for prompt in PROMPTS[:4]]
