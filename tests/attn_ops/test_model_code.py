"""What the code of a model raises is a finding; that a device has no room left is none."""

from __future__ import annotations

import pytest
import torch

from paged_attn import LLM
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code, model_may_fail
from tests.tiny_models import build


@pytest.mark.parametrize("error", [TypeError("none"), RuntimeError("none"), AssertionError("none")], ids=lambda error: type(error).__name__)
def test_an_error_is_a_finding(error: Exception) -> None:
    with pytest.raises(UnsupportedError, match=rf"this model: {type(error).__name__}: none") as caught, model_code(_finding):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [UnsupportedError("refused"), torch.OutOfMemoryError("no room")], ids=lambda error: type(error).__name__)
def test_these_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, model_code(_finding):
        raise error
    assert caught.value is error


def test_a_failure_of_the_model_is_kept_and_a_full_device_is_none() -> None:
    error = TypeError("none")
    with model_may_fail() as failures:
        raise error
    assert failures == [error]
    with pytest.raises(torch.OutOfMemoryError), model_may_fail():
        raise torch.OutOfMemoryError("no room")
    with pytest.raises(KeyboardInterrupt), model_may_fail():
        raise KeyboardInterrupt


def test_a_full_device_is_no_refusal_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(type(model.lm_head), "forward", _no_room)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        LLM(model, num_pages=8)


def _finding(why: str) -> UnsupportedError:
    return UnsupportedError(f"this model: {why}")


def _no_room(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("no room")
