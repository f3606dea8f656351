"""What a model and a pool accept: token ids, positions, end tokens, pages."""

import numpy
import pytest
import torch
from torch import nn

from paged_attn import EngineConfig, SamplingParams, UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import page_elements
from paged_attn.engine.memory.budget import MemoryBudget
from paged_attn.engine.model.model_limits import ModelLimits
from tests.engine.models import assert_idle, make_engine, make_llm, oracle, random_prompts, run_all, tiny
from tests.tiny_models import VOCAB, build

POSITIONS = 256
LIMITS = ModelLimits(vocab_size=VOCAB, max_positions=POSITIONS, eos_token_ids=frozenset())


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_limits_come_from_the_models_config(name: str) -> None:
    assert ModelLimits.of(build(name)) == LIMITS


@pytest.mark.parametrize(("eos", "expected"), [(7, {7}), ([7, 9], {7, 9}), (torch.tensor([7, 9]), {7, 9}), (None, set())])
def test_end_tokens_come_from_the_generation_config(eos, expected: set[int]) -> None:
    model = build("qwen3")
    model.generation_config.eos_token_id = eos
    assert ModelLimits.of(model).eos_token_ids == expected


def test_a_module_without_config_has_no_limits() -> None:
    limits = ModelLimits.of(nn.Linear(2, 2))
    assert limits == ModelLimits(None, None, frozenset())
    assert limits.checked_prompt([10**9]) == [10**9] and limits.allowed_new_tokens(10**9, 5) == 5


@pytest.mark.parametrize("ids", [[3, 95], (3, 95), torch.tensor([3, 95]), numpy.array([3, 95]), range(3, 5)])
def test_a_prompt_becomes_a_list_of_plain_ints(ids) -> None:
    checked = LIMITS.checked_prompt(ids)
    assert checked == [int(i) for i in ids] and all(type(i) is int for i in checked)


@pytest.mark.parametrize("ids", [[], (), torch.tensor([], dtype=torch.int64)])
def test_an_empty_prompt_is_refused(ids) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        LIMITS.checked_prompt(ids)


@pytest.mark.parametrize("bad", [-1, VOCAB, 10**12])
def test_an_id_out_of_range_is_named_with_its_position(bad: int) -> None:
    with pytest.raises(ValueError, match=f"token id {bad} at position 2 .* ids 0 to {VOCAB - 1}"):
        LIMITS.checked_prompt([0, VOCAB - 1, bad, 1])


@pytest.mark.parametrize("ids", [[1.0, 2.0], ["a"], "123", b"12", 5, None, [[1, 2]], torch.tensor([1.5]), torch.tensor([[1, 2]])])
def test_what_is_not_a_list_of_ints_is_refused(ids) -> None:
    with pytest.raises(TypeError, match="a prompt of token ids is"):
        LIMITS.checked_prompt(ids)


def test_positions_bound_prompt_and_new_tokens() -> None:
    assert len(LIMITS.checked_prompt([1] * POSITIONS)) == POSITIONS
    with pytest.raises(ValueError, match="260 tokens > 256, the model's positions; shorten it by 4"):
        LIMITS.checked_prompt([1] * (POSITIONS + 4))
    # the last new token is never fed back, so that it needs no position
    assert [LIMITS.allowed_new_tokens(n, 10) for n in (1, 246, 247, 248, 256)] == [10, 10, 10, 9, 1]


def test_max_model_len_takes_the_place_of_more_positions() -> None:
    few = LIMITS.within(40)
    assert LIMITS.within(None) is LIMITS and few.allowed_new_tokens(38, 10) == 3
    with pytest.raises(ValueError, match="44 tokens > 40, max_model_len; shorten it by 4"):
        few.checked_prompt([1] * 44)
    with pytest.raises(ValueError, match="max_model_len: got 300; allowed: 1 to 256, as many as the model has positions"):
        LIMITS.within(300)
    with make_llm(max_model_len=40) as llm:
        prompt = random_prompts(0, 38)[0]
        (got,) = llm.generate(prompt, SamplingParams(max_new_tokens=50))
        assert (got.token_ids, got.finish_reason) == (oracle(prompt, 3), "length") and llm.engine.input_processor.room == 40


def test_generation_ends_at_the_last_position() -> None:
    llm = make_llm()
    prompt = random_prompts(0, POSITIONS - 3)[0]
    (got,) = llm.generate(prompt, SamplingParams(max_new_tokens=50))
    assert (got.token_ids, got.finish_reason) == (oracle(prompt, 4), "length")


def test_the_pool_has_the_pages_asked_for_or_those_that_fit() -> None:
    layers = make_engine().pool.layers
    cpu = torch.device("cpu")
    assert MemoryBudget(EngineConfig(num_pages=7, kv_memory_gib=1.0), layers, torch.float32, cpu).pages() == 7
    page_bytes = page_elements(layers, 16) * 4
    assert page_bytes == 3 * 16 * 2 * 2 * 8 * 4  # layers, tokens, K and V, heads, head_dim, bytes
    for gib, expected in ((10 * page_bytes / 2**30, 10), (10.9 * page_bytes / 2**30, 10)):
        assert MemoryBudget(EngineConfig(kv_memory_gib=gib), layers, torch.float32, cpu).pages() == expected
        assert MemoryBudget(EngineConfig(kv_memory_gib=gib), layers, torch.bfloat16, cpu).pages() // 2 == expected
    with pytest.raises(UnsupportedError, match=r"holds 1 pages of 0.01 MiB; at least 2"):
        MemoryBudget(EngineConfig(kv_memory_gib=1.5 * page_bytes / 2**30), layers, torch.float32, cpu).pages()


def test_a_request_that_can_never_fit_is_refused_with_the_sum() -> None:
    engine = make_engine(num_pages=6)  # 5 usable pages of 4
    with pytest.raises(UnsupportedError) as raised:
        engine.add_request([1] * 11, SamplingParams(max_new_tokens=11))
    for part in (
        "11 prompt + 11 new tokens",
        "21 tokens of KV = 6 pages of 4",
        "room for 5 pages of one request (= 20 tokens)",
        "max_new_tokens",
    ):
        assert part in str(raised.value)
    assert_idle(engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("prompt_length", "new"), [(11, 10), (20, 1), (1, 20)])
def test_a_request_that_just_fits_runs(prompt_length: int, new: int, prefix_cache: bool) -> None:
    llm = make_llm(num_pages=6, prefix_cache=prefix_cache, max_batch_tokens=7)
    prompt = random_prompts(1, prompt_length)[0]
    for _ in range(2):  # and again over its own cached prefix
        (got,) = llm.generate(prompt, SamplingParams(max_new_tokens=new))
        assert got.token_ids == oracle(prompt, new)
    with pytest.raises(UnsupportedError):
        llm.generate(prompt, SamplingParams(max_new_tokens=new + 1))


def test_positions_count_before_the_pool_does() -> None:
    engine = make_engine(num_pages=2, page_size=POSITIONS)
    request = engine.add_request([1] * (POSITIONS - 1), SamplingParams(max_new_tokens=10**6))
    assert request.max_new_tokens == 2
    run_all(engine)
    assert tiny().config.max_position_embeddings == POSITIONS
