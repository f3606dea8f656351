"""Experts shared out over two gloo processes: the tokens of one process, on both ranks; what is left alone and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.oracle import greedy
from tests.test_tensor_parallel import RECORDED_TOKENS, expected, on_both, two_processes
from tests.two_ranks import PROMPTS
from tests.two_ranks_experts import CASES
from tests.versions import NEWEST, newest_only
from tests.zoo.build import build

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw of every case, from one start of two processes."""
    cases = [case for case in CASES if NEWEST or case != "sent tokens"]
    return two_processes("tests.two_ranks_experts", cases, tmp_path_factory.mktemp("ranks") / "seen")


def of_zoo(name: str) -> list[list[int]]:
    model = build(name)
    return [greedy(model, prompt, 8) for prompt in PROMPTS]


def test_each_rank_runs_its_own_experts_through_the_op(seen: list[dict[str, Any]]) -> None:
    """Two of four; the router is one op, whose ids are those of all."""
    got = on_both(seen, "qwen3_moe rewritten")
    assert got["runs"] == [expected("qwen3_moe")] * 2
    assert got["experts of a layer"] == [2, 2] and got["routers"] == 2 and got["heads"] == 1


def test_biases_and_a_gate_of_its_own_hooked(seen: list[dict[str, Any]]) -> None:
    assert on_both(seen, "gpt_oss hooked")["runs"] == [of_zoo("gpt_oss")] * 2


def test_experts_that_all_tokens_share_are_cut_as_the_rest_is(seen: list[dict[str, Any]]) -> None:
    got = on_both(seen, "deepseek_v3 rewritten")
    assert got["runs"] == [of_zoo("deepseek_v3")] * 2 and set(got["experts of a layer"]) == {2}


def test_attention_may_be_whole_on_all_ranks(seen: list[dict[str, Any]]) -> None:
    got = on_both(seen, "mixtral rewritten, attention whole")
    assert got["runs"] == [of_zoo("mixtral")] * 2
    assert got["heads"] == build("mixtral").config.num_key_value_heads and set(got["experts of a layer"]) == {2}


def test_recurrent_layers_that_every_rank_has_whole(seen: list[dict[str, Any]]) -> None:
    assert on_both(seen, "recurrent layers whole") == of_zoo("qwen3_next")
    kind, words = on_both(seen, "recurrent layers cut")
    assert kind == "UnsupportedError" and "and so is model.layers.0.linear_attn, which has recurrent state" in words


def test_decodes_are_full_graphs(seen: list[dict[str, Any]]) -> None:
    got = on_both(seen, "captured")
    assert got["tokens"] == expected("qwen3_moe", RECORDED_TOKENS) and got["modes"] == ["full", "piecewise"]


def test_graphs_are_found_on_disk(seen: list[dict[str, Any]]) -> None:
    got = on_both(seen, "cached graphs")
    assert [found for found, _ in got["runs"]] == [False, True, False] and got["files"] == 2
    assert [tokens for _, tokens in got["runs"]] == [expected("mixtral")] * 3


def test_a_model_that_transformers_read_in_shards(seen: list[dict[str, Any]]) -> None:
    got = on_both(seen, "read in shards")
    if got is None:
        pytest.skip("from_pretrained(distributed_config=...) needs accelerate: pip install '.[tp]'")
    assert got == expected("qwen3_moe")


def test_the_model_is_left_as_it_was_found(seen: list[dict[str, Any]]) -> None:
    assert all((got := on_both(seen, "left as found")).values()), got


def test_what_one_rank_alone_suspects_is_looked_into_by_all(seen: list[dict[str, Any]]) -> None:
    """Each further run of the model takes all ranks, and so do the tokens that follow."""
    assert on_both(seen, "one rank's suspect, explained") == of_zoo("mixtral")
    (kind, elsewhere), (other_kind, words) = (each["one rank's suspect"] for each in seen)
    assert kind == other_kind == "UnsupportedError"
    assert "self-check failed on another rank" in elsewhere
    assert "self-check failed on rank 1 of 2" in words and "among a planted step" in words


@newest_only
def test_tokens_are_not_sent(seen: list[dict[str, Any]]) -> None:
    kind, words = on_both(seen, "sent tokens")
    assert kind == "UnsupportedError" and "ep_implementation='all_to_all'" in words and "'all_reduce'" in words
