"""What crosses processes: params and results go there, errors come back. One that cannot be read breaks a whole pool of processes."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from paged_attn import SamplingParams
from paged_attn.asynchronous.errors import NotServingError, PromptError, RequestFailedError, StepFailedError
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.chat.errors import ChatError
from paged_attn.engine.sampling.structured.guides import GuideError
from tests.engine.models import make_llm

ERRORS = [
    ChatError("messages: none", "messages", "no_messages"), PromptError("too long", "prompt"), NotServingError("loading", "loading", 5),
    RequestFailedError("NaN", "bad_logits"), StepFailedError("out of memory"), UnsupportedError("no"), GuideError("none left"),
]  # fmt: skip


def refusing() -> None:
    raise ERRORS[0]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors(error: Exception) -> None:
    error.add_note("(prompt 1 of 2)")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error) and str(other) == str(error) and vars(other) == vars(error)


def test_an_error_of_a_pool_is_told() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool, pytest.raises(ChatError, match="messages: none") as raised:
        pool.submit(refusing).result(timeout=60)
    assert (raised.value.param, raised.value.code) == ("messages", "no_messages")


def test_params() -> None:
    params = SamplingParams(max_tokens=5, stop="a", seed=3, logit_bias={5: 1.0}, allowed_token_ids=[5, 6])
    for other in (pickle.loads(pickle.dumps(params)), copy.copy(params), copy.deepcopy(params)):
        assert other == params and other.stated == params.stated


def test_an_engine_stays_in_its_process() -> None:
    llm = make_llm()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="an LLM can be neither copied nor pickled; make one in each process"):
            copied(llm)
