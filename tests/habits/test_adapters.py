"""Adapters of peft, chosen by each request: every request of a mixed batch gets peft's own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paged_attn import LLM, SamplingParams, UnsupportedError
from tests.engine.lora.adapters import Adapters, adapted, base
from tests.engine.models import OVERLAP, assert_nothing_left
from tests.oracle import random_prompts

PROMPTS = random_prompts((5, 17, 33, 9, 12, 3))
WHICH = [None, "a", "b", "a", None, "b"]
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
SETTINGS: dict[str, Any] = {"page_size": 4, "num_pages": 200, "max_batch_tokens": 16, "overlap": OVERLAP}
KINDS = {
    "llama": ("q_proj", "v_proj", "down_proj"),
    "qwen3": ("k_proj", "o_proj", "up_proj", "lm_head"),
    "gpt2": ("c_attn", "c_fc"),
    "mixtral": ("q_proj", "k_proj", "o_proj"),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return made(tmp_path_factory.mktemp("adapters"), "llama")


def made(folder: Path, name: str) -> Adapters:
    other = {"r": 7, "targets": KINDS[name][1:], "lora_alpha": 30, "use_rslora": True}
    patterns = {"targets": KINDS[name][:2], "rank_pattern": {KINDS[name][0]: 2}, "alpha_pattern": {rf"[^0]\..*{KINDS[name][0]}": 3}}
    return Adapters(folder, name, {"a": {"targets": KINDS[name]}, "b": other, "c": patterns})


@pytest.fixture(scope="module")
def llm(adapters: Adapters) -> LLM:
    return LLM(base(), loras=adapters.folders, **SETTINGS)


def tokens(llm: LLM, which: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(prompts, GREEDY, lora=which)]


def test_every_request_of_a_mixed_batch_has_its_own(llm: LLM, adapters: Adapters) -> None:
    expected = adapters.expected(PROMPTS, WHICH)
    assert len({tuple(adapters.generate(which, PROMPTS[0])) for which in (None, "a", "b", "c")}) == 4
    for _ in range(2):  # the second time from the prefix cache
        assert tokens(llm, WHICH) == expected
    assert tokens(llm, "c") == adapters.expected(PROMPTS, ["c"] * 6)
    assert tokens(llm, None) == adapters.expected(PROMPTS, [None] * 6)
    assert llm.loras == ("a", "b", "c")
    assert_nothing_left(llm)


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_architectures_merged_and_not(name: str, merged: bool, tmp_path: Path) -> None:
    adapters = made(tmp_path, name)
    which = [None, "a", "b", "c", None, "b"]
    with LLM(base(name), loras=adapters.folders, merge_linears=merged, **SETTINGS) as llm:
        assert tokens(llm, which) == adapters.expected(PROMPTS, which)


def test_no_prefix_is_shared_between_adapters(llm: LLM, adapters: Adapters) -> None:
    (prompt,) = random_prompts((40,), seed=7)
    for which in (None, "a", "b"):
        first, second = (llm.generate(prompt, GREEDY, lora=which)[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, 36)
        assert first.token_ids == second.token_ids == adapters.generate(which, prompt)


def test_who_is_preempted_goes_on_with_its_adapter(adapters: Adapters) -> None:
    prompts, which = random_prompts((12,) * 6, seed=3), ["a", "b", None] * 2
    with LLM(base(), loras=adapters.folders, **{**SETTINGS, "num_pages": 24}) as llm:
        completions = llm.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True), lora=which)
        assert [c.token_ids for c in completions] == adapters.expected(prompts, which, 20)
        assert llm.engine.scheduler.stats.preemptions > 0


def test_loaded_and_unloaded_while_others_run(adapters: Adapters) -> None:
    with LLM(base(), max_loras=2, **SETTINGS) as llm:
        assert llm.loras == ()
        llm.load_lora("x", adapters.folders["a"])
        stream = llm.stream(PROMPTS[1], SamplingParams(max_new_tokens=60, ignore_eos=True), lora="x")
        seen = [next(stream).token_id for _ in range(3)]
        llm.load_lora("y", adapters.folders["b"])
        assert tokens(llm, "y", PROMPTS[:2]) == adapters.expected(PROMPTS[:2], ["b", "b"])
        with pytest.raises(ValueError, match="'x' is used by 1 requests that have not finished"):
            llm.unload_lora("x")
        with pytest.raises(ValueError, match="all 2 places for adapters are taken, by x, y"):
            llm.load_lora("z", adapters.folders["c"])
        llm.unload_lora("y")
        llm.load_lora("z", adapters.folders["c"])
        seen += [event.token_id for event in stream]
        assert seen == adapters.generate("a", PROMPTS[1], 60)
        llm.unload_lora("x")
        with pytest.raises(ValueError, match="lora is 'x'; loaded are 'z'"):
            llm.generate(PROMPTS[0], GREEDY, lora="x")
        llm.load_lora("x", adapters.folders["b"])  # another one of that name: nothing that the first left in the cache is used
        assert tokens(llm, ["x", "z"], PROMPTS[1:3]) == adapters.expected(PROMPTS[1:3], ["b", "c"])


def test_steps_without_an_adapter_run_the_graph_without(adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(base(), loras=adapters.folders, **SETTINGS) as llm:
        assert llm.engine.lora_step_runner is not None
        ran: list[bool] = []
        for steps, has_adapters in ((llm.engine.step_runner, False), (llm.engine.lora_step_runner, True)):
            run = steps.run
            monkeypatch.setattr(steps, "run", lambda step, run=run, kind=has_adapters: (ran.append(kind), run(step))[1])
        tokens(llm, None)
        assert set(ran) == {False}
        ran.clear()
        tokens(llm, "b")
        assert set(ran) == {True}


def test_a_live_model_of_peft_gives_its_adapters_by_name(adapters: Adapters) -> None:
    model = adapted(seed=5)
    model.load_adapter(adapters.folders["b"], "b")
    with LLM(base(), loras={"b": model, "mine": model}, **SETTINGS) as llm:  # "mine": no adapter of this name, so the active one
        expected = adapters.generate("b", PROMPTS[0])
        assert tokens(llm, ["b"], PROMPTS[:1]) == [expected]
        model.set_adapter("default")
        assert tokens(llm, ["mine"], PROMPTS[:1]) == [Adapters.generate(_Only(model), None, PROMPTS[0])]  # type: ignore[arg-type]


class _Only:
    def __init__(self, model: Any) -> None:
        self.models = {None: model}


def test_names_and_lists_are_checked(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 names of adapters in lora for 6 prompts"):
        llm.generate(PROMPTS, GREEDY, lora=["a", "b"])
    with pytest.raises(ValueError, match="lora is 'nobody'; loaded are 'a', 'b', 'c'"):
        llm.generate(PROMPTS, GREEDY, lora="nobody")
    with LLM(base(), num_pages=20) as plain, pytest.raises(ValueError, match="max_loras=8"):
        plain.generate(PROMPTS[0], GREEDY, lora="a")


def test_a_model_with_adapters_in_it_is_served_with_the_active_one_or_named(adapters: Adapters) -> None:
    model = adapted(seed=1, targets=KINDS["llama"])
    with LLM(model, **SETTINGS) as llm:
        assert tokens(llm, None) == adapters.expected(PROMPTS, ["a"] * 6)
    with pytest.raises(UnsupportedError, match=r"has adapters of peft in it already.*model\.unload\(\)"):
        LLM(model, loras=adapters.folders, **SETTINGS)
