"""Sharded models in two gloo processes: the tokens of one process, on both ranks; what they must agree on; what is refused."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.errors import ContextError
from paged_attn.engine import lead
from paged_attn.engine.lead import first_rank_leads
from paged_attn.parallel.local_model import enter_local
from paged_attn.parallel.plan import plan_of
from paged_attn.parallel.ranks import Ranks
from paged_attn.parallel.shard import shard
from tests import two_ranks
from tests.oracle import greedy
from tests.two_ranks import CASES, PROMPTS, SETTINGS, whole
from tests.versions import NEWEST, newest_only

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
ODD_HEADS = ("uneven vocabulary", "example")  # of 97 and 257 tokens: transformers 5.17 gathers no head of odd size
RECORDED_TOKENS = 12  # what tests/engine/steps/test_captured_steps.py asks for


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw of every case, from one start of two processes."""
    cases = [case for case in CASES if NEWEST or case not in ODD_HEADS]
    return two_processes("tests.two_ranks", cases, tmp_path_factory.mktemp("ranks") / "seen")


def two_processes(module: str, cases: list[str], out: Path) -> list[dict[str, Any]]:
    """What each of two ranks writes of the cases of a module."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module, str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([*command, *cases], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


def on_both(seen: list[dict[str, Any]], case: str) -> Any:
    """What a case gave, which must be the same on both ranks."""
    assert seen[0][case] == seen[1][case]
    return seen[0][case]


@functools.cache
def _expected(name: str, new_tokens: int, overrides: tuple[tuple[str, Any], ...]) -> list[list[int]]:
    model = whole(name, **dict(overrides))
    return [greedy(model, prompt, new_tokens) for prompt in PROMPTS]


def expected(name: str, new_tokens: int = 8, **overrides: Any) -> list[list[int]]:
    """The whole model's own `generate`."""
    return _expected(name, new_tokens, tuple(overrides.items()))


@pytest.mark.parametrize("case", ["llama hooked", "qwen3 hooked", "qwen3_moe hooked", "qwen3_moe rewritten"])
def test_two_ranks_give_the_tokens_of_the_whole_model(seen: list[dict[str, Any]], case: str) -> None:
    """Ragged, in chunks, with shared prefixes, cold and warm; each rank keeps its own KV heads only."""
    got = on_both(seen, case)
    assert got["runs"] == [expected(case.split()[0])] * 2
    assert got["heads"] == [[2, 1]] * 2 and got["pool heads"] == 1
    assert got["cached"] >= 5 * 4


@pytest.mark.parametrize("case", ["gemma3_text windows hooked", "gemma3_text windows rewritten"])
def test_windows_give_back_the_same_pages_on_every_rank(seen: list[dict[str, Any]], case: str) -> None:
    """Where rank 1 has room for fewer frames. Page tables of each group are among what `on_both` compares."""
    got = on_both(seen, case)
    assert got["keeps"] == ["all tokens", "window 8"] and got["pool heads"] == 1 and got["frames"] == 2 * 50 - 17
    model = whole("gemma3_text", num_hidden_layers=4, sliding_window=8)
    assert got["runs"] == [[greedy(model, prompt, two_ranks.WINDOWS_TOKENS) for prompt in two_ranks.LONG_PROMPTS]] * 2
    assert sum(given > 0 for given in got["given back"]) > 20 and sum(got["given back"]) > got["frames"]
    full, window = (sum(frame > 0 for frame in frames) for frames in got["table"])
    assert 0 < window < full, "what is cached has no frames any more behind its windows"


def test_captured_steps_hold_the_collectives(seen: list[dict[str, Any]]) -> None:
    got = on_both(seen, "qwen3 rewritten and captured")
    assert got["tokens"] == expected("qwen3", RECORDED_TOKENS) and got["modes"] == ["full", "piecewise"]


def test_the_model_is_left_as_it_was_found(seen: list[dict[str, Any]]) -> None:
    """Two engines at once; linears were merged, and the DTensors lie where the merged weights do."""
    got = on_both(seen, "llama rewritten and merged")
    assert got.pop("tokens") == [expected("llama")] * 2
    assert got.pop("merges") > 0
    assert all(got.values()), got


def test_graphs_are_found_on_disk_by_all_ranks_or_by_none(seen: list[dict[str, Any]]) -> None:
    """Each rank keeps one of its own. What traces runs the model, and with it the collectives of all."""
    got = on_both(seen, "kept graphs")
    assert [found for found, _ in got["runs"]] == [False, True, False] and got["files"] == 2
    assert [tokens for _, tokens in got["runs"]] == [expected("llama")] * 3


def test_ranks_capture_the_same_shapes(seen: list[dict[str, Any]]) -> None:
    """Rank 0 has room for more; a shape that rank 1 runs padded and rank 0 not would mix up their sums."""
    got = on_both(seen, "unequal budgets")
    assert got["captured"] == ["piecewise 16", "piecewise 24"] and "full 2" in got["refused"]
    assert got["tokens"] == expected("llama", RECORDED_TOKENS) and "piecewise" in got["modes"]


def test_every_rank_has_as_many_pages_as_the_least(seen: list[dict[str, Any]]) -> None:
    assert on_both(seen, "unequal memory") == SETTINGS["num_pages"] - 17


def test_unseeded_requests_draw_the_same_everywhere_and_not_twice_the_same(seen: list[dict[str, Any]]) -> None:
    """In "pushed", rank 1 draws other tokens on purpose: rank 0's count, with and without overlap."""
    got = on_both(seen, "sampling")
    assert len(set(map(tuple, got["free"]))) == 3
    assert all(len(tokens) == 8 for run in got["pushed"] for tokens in run)


def test_logits_are_equal_bit_for_bit_whatever_the_hidden_states(seen: list[dict[str, Any]]) -> None:
    got = on_both(seen, "equal logits")
    assert set(got) == {"whole head", "sharded head"} and got["whole head"] != got["sharded head"]


def test_tied_embeddings_stay_tied_where_both_are_cut_alike(seen: list[dict[str, Any]]) -> None:
    got = on_both(seen, "tied")
    assert got["same"] and got["parted"]
    assert got["tokens"] == [expected("qwen3", tie_word_embeddings=True)] * 2


@newest_only
def test_a_vocabulary_that_does_not_divide(seen: list[dict[str, Any]]) -> None:
    assert on_both(seen, "uneven vocabulary") == expected("llama", vocab_size=97)


def test_ranks_with_unequal_shares_look_at_as_many_rows(seen: list[dict[str, Any]]) -> None:
    assert on_both(seen, "unequal shares") == expected("llama")


def test_styles_beyond_the_models_own_plans(seen: list[dict[str, Any]]) -> None:
    got = on_both(seen, "other styles")
    assert list(got.values()) == [expected("llama")] * len(got)


def test_biases_are_added_once(seen: list[dict[str, Any]]) -> None:
    assert on_both(seen, "biases") == expected("llama", attention_bias=True, mlp_bias=True)


def test_a_model_that_transformers_read_in_shards(seen: list[dict[str, Any]]) -> None:
    got = on_both(seen, "read in shards")
    if got is None:
        pytest.skip("from_pretrained(tp_plan=...) needs accelerate: pip install '.[tp]'")
    assert got == expected("llama")


def test_the_first_rank_leads_and_the_others_do_as_it_does(seen: list[dict[str, Any]]) -> None:
    leader, follower = seen[0]["led"], seen[1]["led"]
    assert leader["leader"] == {"first": expected("llama")[:3], "refused": "ValueError", "second": expected("llama")}
    assert follower["leader"] == {} and leader["ended"] == follower["ended"]
    assert (leader["ended"]["left"], leader["ended"]["still cached"], leader["ended"]["closed"]) == (0, 0, True)
    assert leader["together"] == follower["together"] == expected("llama")[:2]
    assert (leader["skips trial"], follower["skips trial"]) == (False, True)


def test_nothing_is_said_to_ranks_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever, or hide the error that tells of it."""
    ranks: Any = SimpleNamespace(group=mock.Mock())
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: None)
    gone = mock.Mock(side_effect=RuntimeError("connection closed by peer"))
    monkeypatch.setattr(dist, "broadcast_object_list", gone)
    line = lead._Line(ranks)
    with pytest.raises(RuntimeError, match="closed by peer"):
        line.say("step")
    line.say("close")
    assert gone.call_count == 1
    for ask in (lambda leader: leader.step(), lambda leader: leader.add_request([4])):
        with pytest.raises(ContextError, match="the other ranks left after an error"):
            ask(lead._Leader(mock.Mock(), line))


class Someone:
    """Equal to itself alone, and not to what pickle makes of it."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"params": SamplingParams(logits_processors=[lambda ids, scores: scores])}, "cannot be pickled: .*lambda"),
        ({"namespace": Someone()}, "its namespace is .*, which is another one there"),
        ({"tenant": Someone()}, "its tenant is"),
    ],
)
def test_what_other_ranks_can_not_be_told_is_refused_before_anybody_has_it(given: dict[str, Any], words: str) -> None:
    engine, line = mock.Mock(), mock.Mock()
    with pytest.raises(ValueError, match=words):
        lead._Leader(engine, line).add_request([4], **given)
    assert not engine.add_request.called and not line.say.called


def test_only_sharded_models_are_led() -> None:
    with LLM(whole("llama"), **SETTINGS, compile=False) as llm, pytest.raises(ContextError, match="use it as it is"):
        with first_rank_leads(llm):
            pass


@newest_only
def test_the_example_says_in_two_processes_what_it_says_in_one(seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert on_both(seen, "example") == importlib.import_module("examples.tensor_parallel").main()


@pytest.mark.parametrize("what", ["settings", "prompt", "number of requests", "parameters"])
def test_ranks_that_do_different_things_are_stopped(seen: list[dict[str, Any]], what: str) -> None:
    subject = "the engine's settings" if what == "settings" else "the next step"
    for rank in range(2):
        kind, words = seen[rank]["divergence"][what]
        assert kind == "DivergedError" and f"this is rank {rank}" in words
        assert f"do not agree on {subject} (" in words


@pytest.mark.parametrize(
    "what, words",
    [
        ("cut heads", "k_proj has 1 heads of 8, which 2 ranks cannot share"),
        ("logits in slices", "lm_head leaves each rank with a slice of the logits"),
        ("unknown style", "model.norm (LlamaRMSNorm) has the parallel style 'sequence_parallel'"),
        ("other sharding", "fsdp_size=2"),
    ],
)
def test_what_is_not_served_says_so(seen: list[dict[str, Any]], what: str, words: str) -> None:
    kind, message = on_both(seen, "refusals")[what]
    assert kind == "UnsupportedError" and words in message


def test_a_rank_whose_peer_is_gone_says_so(seen: list[dict[str, Any]]) -> None:
    kind, words = seen[0]["one rank leaves"]
    assert kind == "DivergedError" and "one of them is gone" in words


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank_is_no_tensor_parallelism(alone: None) -> None:
    model = shard(whole("llama"))
    assert plan_of(model) is None and enter_local(model) is None
    with LLM(model, **SETTINGS, compile=False) as llm:
        assert llm.engine.runner.ranks is None
        assert [c.token_ids for c in llm.generate(PROMPTS[:1], two_ranks.GREEDY)] == expected("llama")[:1]


def test_engines_of_one_group_share_its_control_messages(alone: None) -> None:
    world = dist.group.WORLD
    assert world is not None
    first, second = Ranks(world), Ranks(world)
    assert first._control is second._control is not world
    assert first.least(3) == 3 and second.all_say(True) and not second.all_say(False)
    first.check_settings("1")


def test_shard_needs_a_process_group_and_a_plan() -> None:
    with pytest.raises(RuntimeError, match="torchrun"):
        shard(whole("llama"))
