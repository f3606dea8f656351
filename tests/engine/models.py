"""Tiny models, what their own `generate` says, a tokenizer for them, and engines over them.

Prompts never hold token 0: it is the pad id, and `generate` would take it for padding.
"""

from __future__ import annotations

import copy
import functools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paged_attn import LLM, EngineConfig, SamplingParams
from paged_attn.attn_ops.kv.page_allocator import GroupedAllocator
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.engine import Engine
from paged_attn.engine.requests.detokenizer import IncrementalDetokenizer
from paged_attn.engine.requests.request import Request
from paged_attn.engine.runners import make_runner
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.engine.sampling.sampling_state import SamplingState
from tests.engine.memory.radix_invariants import check_invariants, num_payloads
from tests.tiny_models import VOCAB, build

OVERLAP = "PAGED_ATTN_TEST_OVERLAP" in os.environ  # how engines of tests run that do not say: CI runs these tests both ways
POISON = VOCAB - 1  # `poisoned` makes this token's embedding NaN


@functools.cache
def tiny(name: str = "qwen3") -> PreTrainedModel:
    """One model per name and process; untied, for tied tiny models repeat one token for ever."""
    return build(name, tie_word_embeddings=False)


@functools.cache
def _runner(model: PreTrainedModel, scans: bool) -> TracedRunner:
    return TracedRunner(model, CompileOptions(passes=("scans",) if scans else ()))


def make_engine(model: PreTrainedModel | None = None, tokenizer: Any = None, **settings: Any) -> Engine:
    """An engine of its own over the model's one capture, which takes a second to make and holds no state of a request."""
    return make_llm(model, tokenizer, **settings).engine


def make_llm(model: PreTrainedModel | None = None, tokenizer: Any = None, **settings: Any) -> LLM:
    model = model or tiny()
    config = EngineConfig(**{"page_size": 4, "num_pages": 128, "overlap": OVERLAP, **settings})
    with one_capture():
        return LLM(model, tokenizer=tokenizer, config=config)


def one_capture() -> Any:
    """Engines made inside share one capture of each model, without optional passes but `scans`."""
    return mock.patch.object(make_runner, "TracedRunner", lambda model, options, *_: copy.copy(_runner(model, "scans" in options.passes)))


def random_prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB - 1) for _ in range(length)] for length in lengths]


@functools.cache
def _generated(model: PreTrainedModel, prompt: tuple[int, ...], new: int, settings: tuple[tuple[str, Any], ...]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **dict(settings))
    return out[0, len(prompt) :].tolist()


def oracle(prompt: Sequence[int], new: int = 12, model: PreTrainedModel | None = None, **settings: Any) -> list[int]:
    """The new tokens of the model's own greedy `generate`, this prompt alone."""
    return list(_generated(model or tiny(), tuple(prompt), new, tuple(settings.items())))


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, for 96 tokens: 0 is <pad>, the others are the 95 printable ASCII characters in order."""
    vocab = {"<pad>": 0, "Ġ": 1, **{chr(code): code - 31 for code in range(33, 127)}}
    return _byte_level(vocab)


@functools.cache
def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, for 257 tokens: 0 is <pad>, then every byte; most sequences are not valid UTF-8."""
    return _byte_level({"<pad>": 0, **{character: 1 + i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}})


def _byte_level(vocab: dict[str, int]) -> PreTrainedTokenizerFast:
    made = Tokenizer(BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", clean_up_tokenization_spaces=False)


@contextmanager
def poisoned(model: PreTrainedModel | None = None) -> Iterator[None]:
    """Inside, any request that holds the token POISON gets NaN logits, and NaN keys and values."""
    weight = (model or tiny()).get_input_embeddings().weight
    good = weight[POISON].detach().clone()
    with torch.no_grad():
        weight[POISON] = float("nan")
        try:
            yield
        finally:
            weight[POISON] = good


def request_of(tokens: list[int], namespace: Any = None) -> Request:
    """A request without an engine."""
    params = SamplingParams()
    return Request(
        id="r", prompt_token_ids=list(tokens), params=params, stop_token_ids=frozenset(), max_new_tokens=8, sampling=SamplingState(params),
        detokenizer=IncrementalDetokenizer(None), arrival=0, namespace=namespace, tokens=list(tokens),
    )  # fmt: skip


def run_all(engine: Engine) -> list[Any]:
    """Step until no request is left; all events."""
    events, steps = [], 0
    while engine.has_work:
        events += engine.step()
        steps += 1
        assert steps < 2000, "the engine makes no progress"
    return events


def run_past_errors(engine: Engine) -> tuple[list[Any], int]:
    """As `run_all`, going on after each RuntimeError; all events, and how many errors there were."""
    events, raised = [], 0
    while engine.has_work:
        try:
            events += engine.step()
        except RuntimeError:
            raised += 1
            assert not engine._in_flight and all(request.num_pending == 0 for request in engine.requests.values())
    return events, raised


def fail_once(engine: Engine, error: BaseException, at_call: int = 1) -> None:
    """Let the model raise in its `at_call`-th step from now on, after it has run."""
    run, calls = engine.step_runner.run, iter(range(1, 10**9))

    def failing(*args: Any) -> Any:
        logits = run(*args)
        if next(calls) == at_call:
            raise error
        return logits

    engine.step_runner.run = failing  # type: ignore[method-assign]


def assert_idle(engine: Engine) -> None:
    """No request, lock or page is held by anything but the prefix cache."""
    assert not engine.requests and not engine.scheduler.waiting and not engine.scheduler.running
    cached = 0
    if engine.kv.tree is not None:
        check_invariants(engine.kv.tree)
        assert engine.kv.tree.locked_pages == 0
        cached = engine.kv.tree.num_pages
    if engine.kv.states.allocator is not None:
        assert engine.kv.states.allocator.num_held == engine.kv.states.num_snapshots
        assert engine.kv.tree is None or engine.kv.states.num_snapshots == num_payloads(engine.kv.tree)
    allocator = engine.kv.allocator
    if not isinstance(allocator, GroupedAllocator):
        assert allocator.num_free + cached == engine.kv.num_usable
        return
    assert allocator.num_free_ids + cached == allocator.num_pages - 1
    mapped = allocator.frames[allocator.frames > 0].tolist()
    assert len(set(mapped)) == len(mapped) and allocator.num_free_frames + len(mapped) == allocator.num_frames - 1
    in_tree = set() if engine.kv.tree is None else {page for node, _ in engine.kv.tree.nodes() for page in node.pages}
    assert set(allocator.frames.any(0).nonzero()[0].tolist()) <= in_tree


def assert_nothing_left(llm: LLM) -> None:
    """Idle, and after `close` every page is free and the tree empty."""
    assert not llm._inboxes
    assert_idle(llm.engine)
    llm.engine.close()
    assert llm.engine.kv.allocator.num_free == llm.engine.kv.num_usable
    assert llm.engine.kv.tree is None or llm.engine.kv.tree.num_pages == 0
