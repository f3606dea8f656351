"""Windows and chunks longer than the probe prompts are seen at their ends."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from paged_attn.check.compare import windows
from paged_attn.check.runs.steps import ON_ANOTHER_RANK, ProbeSettings
from tests.check.checked import Hooked, Traced, refused
from tests.tiny_models import build_short

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONG = {"mistral": {"sliding_window": 40}, "llama4_text": {"attention_chunk_size": 48}, "gemma3_text": {"sliding_window": 33}}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LONG)
def test_a_window_or_chunk_that_ends_one_token_off_is_seen(name: str, dtype: torch.dtype) -> None:
    checked = Traced(build_short(name, dtype=dtype, **LONG[name]))
    assert refused(checked) == ""
    for more in (1, -1):
        with checked.with_specs(
            lambda spec, more=more: replace(
                spec, sliding_window=spec.sliding_window and spec.sliding_window + more, chunk=spec.chunk and spec.chunk + more
            )
        ):
            words = refused(checked)
        assert "gives token" in words and "another output than the model's" in words and "allowed" in words


def test_of_a_hooked_model_the_spec_is_what_its_mask_function_said() -> None:
    checked = Hooked(build_short("mistral", sliding_window=40))
    assert refused(checked) == ""


def test_what_would_take_too_long_is_said_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paged_attn")
    checked = Traced(build_short("mistral", sliding_window=40))
    monkeypatch.setattr(windows, "MOST_CPU_OPERATIONS", 1e3)
    assert refused(checked) == ""
    assert "where the window of model.layers.0.self_attn ends was proved on its mask only: 49 tokens take" in caplog.text


def test_a_window_that_no_request_reaches_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Traced(build_short("mistral", sliding_window=250, max_position_embeddings=256))
    monkeypatch.setattr(windows, "_check", None)
    assert refused(checked) == ""


def test_what_another_rank_finds_ends_this_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for that rank in the next collective."""
    checked = Traced(build_short("mistral", sliding_window=40))
    check = windows._check

    def found_elsewhere(*args: object) -> tuple[str, str]:
        monkeypatch.setattr(ProbeSettings, "any_rank", lambda settings, yes: True)
        return check(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(windows, "_check", found_elsewhere)
    assert ON_ANOTHER_RANK in refused(checked)


def test_what_is_too_large_on_another_rank_is_not_looked_at_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look takes all ranks, whose numbers of heads may differ."""
    checked = Traced(build_short("mistral", sliding_window=40))
    alone = ProbeSettings.any_rank
    asked: list[bool] = []

    def too_large(*_: object) -> str:
        monkeypatch.setattr(ProbeSettings, "any_rank", lambda settings, yes: asked.append(yes) or len(asked) == 1)
        return ""

    monkeypatch.setattr(windows, "_too_large", too_large)
    monkeypatch.setattr(windows, "_check", None)
    assert refused(checked) == "" and asked == [False, False] and ProbeSettings.any_rank is not alone


def test_rows_that_are_rounded_further_than_those_of_a_probe_prompt_are_no_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As granitemoe_swa at its published width: of 137 keys some compete, and what rounding does there is measured there."""
    checked, check = Traced(build_short("mistral", sliding_window=40)), windows._check

    def with_smooth_prompts(served: Any, attention: Any, truth: Any, noise: Any, *more: Any) -> tuple[str, str]:
        return check(served, attention, truth, mock.Mock(wraps=noise, limit=lambda _: 1e-8), *more)

    monkeypatch.setattr(windows, "_check", with_smooth_prompts)
    assert refused(checked) == ""
    with checked.with_specs(lambda spec: replace(spec, sliding_window=39)):
        assert "gives token 40 another output" in refused(checked)
    monkeypatch.setattr(windows, "MULTIPLE", 0)
    assert "gives token" in refused(checked)
