"""Bars on stderr: on a terminal, when asked for, and never else."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager, redirect_stderr
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from paged_attn import LLM, SamplingParams
from paged_attn.engine import llm as llm_module
from paged_attn.progress import bar, progress
from tests.tiny_models import build

SHORT = SamplingParams(max_new_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM(build("llama"), num_pages=32, compile=False) as made:
        yield made


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal() -> AbstractContextManager[Terminal]:
    return redirect_stderr(Terminal())


def test_generate_counts_prompts_and_tokens_when_asked(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[5, 6], [7]], SHORT)
    assert capsys.readouterr().err == ""
    done = llm.generate([[5, 6], [7]], SHORT, progress=True)
    err = capsys.readouterr().err
    assert "prompts:" in err and "0/2" in err and [len(each.token_ids) for each in done] == [3, 3]


def test_the_bar_ends_with_all_prompts_and_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    show = llm_module._show
    monkeypatch.setattr(llm_module, "_show", lambda shown, requests: (show(shown, requests), seen.append((shown.n, shown.postfix))))
    llm.generate([[5, 6], [7], [8, 9]], [SHORT, SHORT, SamplingParams(max_new_tokens=1, ignore_eos=True)], progress=True)
    assert seen == [(1, "3 tokens"), (1, "5 tokens"), (3, "7 tokens")]


def test_on_a_terminal_short_work_draws_nothing_and_no_means_no(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def noted(**given):
        shown = bar(**given)
        made.append((bool(shown.disable), given["delay"]))  # noted here: a bar that is closed says that it is disabled
        return shown

    monkeypatch.setattr(llm_module, "bar", noted)
    with on_terminal() as terminal:
        llm.generate([[5, 6]], SHORT)
        llm.generate([[5, 6]], SHORT, progress=False)
        assert terminal.getvalue().strip() == ""
        llm.generate([[5, 6]], SHORT, progress=True)
    assert made == [(False, 1.0), (False, 0.0)] and "prompts" in terminal.getvalue()


def test_no_bar_is_made_that_is_not_drawn(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "bar", lambda **_: pytest.fail("a bar costs as much as the rest of a call"))
    for progress_of_call in (None, False):
        llm.generate([[5, 6]], SHORT, progress=progress_of_call)


def test_progress_is_yes_no_or_none_and_a_wrong_one_leaves_no_request(llm: LLM) -> None:
    with pytest.raises(TypeError, match="progress is 'yes'; allowed are True, False, and None"):
        llm.generate([[5, 6]], SHORT, progress="yes")  # type: ignore[arg-type]
    assert not llm.engine.has_work and not llm._inboxes
    with progress(True):
        with progress(None):
            assert bar(what="x", unit="y").disable is True  # stderr is not a terminal here
        assert bar(what="x", unit="y").disable is False
    assert bar(what="x", unit="y").disable is True


@pytest.mark.parametrize("theirs", [True, False])
def test_loading_shows_its_parts(theirs: bool, tmp_path: Path) -> None:
    was = transformers_logging.is_progress_bar_enabled()
    (transformers_logging.enable_progress_bar if theirs else transformers_logging.disable_progress_bar)()
    build("llama").save_pretrained(tmp_path / "model")
    try:
        for ask, shown in ((True, True), (None, True), (False, False)):
            with on_terminal() as terminal:
                LLM(tmp_path / "model", num_pages=8, compile=False, progress=ask).close()
            text = terminal.getvalue()
            found = [words in text for words in ("loading model", "weights]", "to cpu", "tokenizer")]
            assert found == [shown] * 4 and ("Loading weights" in text) == (theirs and shown), (ask, text)
            assert transformers_logging.is_progress_bar_enabled() == theirs
    finally:
        (transformers_logging.enable_progress_bar if was else transformers_logging.disable_progress_bar)()


def test_the_prefix_cache_can_be_cleared(llm: LLM) -> None:
    prompt = list(range(1, 40))
    llm.clear_prefix_cache()
    llm.generate([prompt], SHORT)
    assert llm.generate([prompt], SHORT)[0].cached_tokens == 32
    assert llm.clear_prefix_cache() > 0 and llm.clear_prefix_cache() == 0
    assert llm.generate([prompt], SHORT)[0].cached_tokens == 0
    with LLM(build("llama"), num_pages=8, compile=False, prefix_cache=False) as without:
        assert without.clear_prefix_cache() == 0
