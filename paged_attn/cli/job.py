"""The main job: load a model, warm it up, run prompts, count and time."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paged_attn.backends.devices import checked_device, device_name
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.llm import LLM
from paged_attn.engine.model.load_options import LoadOptions
from paged_attn.engine.model.loading import PLAIN, checkpoint_task, load_model
from paged_attn.engine.model.task import Task
from paged_attn.engine.requests.outputs import Completion, TokenEvent
from paged_attn.engine.requests.request import Request
from paged_attn.engine.runners.compilers import start_compilers
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.parallel.torchrun import join, num_processes

OnEvent = Callable[[int, TokenEvent], None]
Prompt = str | list[int]  # a text, or token ids


@dataclass(frozen=True)
class Loaded:
    """A model that is ready, and the seconds that it took to load, to rewrite and self-check, and to run the first token."""

    llm: LLM
    load_seconds: float
    rewrite_seconds: float
    warm_up_seconds: float


@dataclass(frozen=True)
class Numbers:
    """What a run cost. Seconds are wall time from the first request to the last token, warm-up not included."""

    seconds: float
    steps: int
    new_tokens: int
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float | None
    kv_pool_bytes: int
    kv_pool_pages: int
    page_size: int

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds


@dataclass(frozen=True)
class Run:
    completions: list[Completion]
    numbers: Numbers


class RunInterruptedError(KeyboardInterrupt):
    """Ctrl-C in `run_prompts`. `run` holds what there was by then; who had not finished ended as cancelled."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run


def load(
    path: str | Path,
    dtype: str,
    device: str | None,
    config: EngineConfig,
    options: LoadOptions = PLAIN,
    task: Task = "generate",
    lora: str | None = None,
) -> Loaded:
    """Load, rewrite and warm up, so that what is timed later is generation only. Under torchrun each process loads its part.

    Args:
        lora: the folder of an adapter, which is its name, too; `config` has room for it.

    Raises:
        ValueError: no model there, or no such device. UnsupportedError: as `LLM` does.
    """
    started = time.perf_counter()
    target, sharded = checked_device(device), num_processes() > 1
    if sharded:
        target = join(target)
    start_compilers(target, config)
    task, defaults = checkpoint_task(path, task, options)
    model, tokenizer = load_model(path, dtype, target, sharded, options, task)
    loaded = time.perf_counter()
    llm = LLM(model, tokenizer=tokenizer, config=config, task=task, embedding_defaults=defaults)
    if lora is not None:
        llm.load_lora(lora, lora)
    rewritten = time.perf_counter()
    llm.run_one_token()
    llm.engine.stats.reset()
    return Loaded(llm, loaded - started, rewritten - loaded, time.perf_counter() - rewritten)


def run_prompts(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, on_event: OnEvent, late: int = 0, lora: str | None = None
) -> Run:
    """Complete all prompts in one continuous batch; the last `late` of them arrive when the first token is out.

    Args:
        params: for each prompt, which gets `n` answers.
        lora: the name of a loaded adapter.
        on_event: called with the number of the answer, those to the first prompt first, and each event, as it comes.

    Raises:
        ValueError: as `LLM.generate` does.
        RunInterruptedError: Ctrl-C.
    """
    engine, ids = llm.engine, [_token_ids(llm, prompt) for prompt in prompts]
    requests: list[Request] = []
    waiting = enumerate(zip(prompts, ids, strict=True))
    number: dict[str, int] = {}
    queued: dict[str, float] = {}
    waits: dict[str, float] = {}

    def add(count: int) -> None:
        for index, (prompt, tokens) in itertools.islice(waiting, count):
            for answer, own in enumerate(params.answers()):
                request = engine.add_request(tokens, own, prompt=prompt if isinstance(prompt, str) else None, lora=lora)
                request.index, request.answer = index, answer
                number[request.id], queued[request.id] = len(requests), time.perf_counter()
                requests.append(request)

    started, interrupted = time.perf_counter(), False
    try:
        add(len(ids) - late)
        while engine.has_work:
            for event in engine.step():
                if event.token_id is not None:
                    waits.setdefault(event.request_id, time.perf_counter() - queued[event.request_id])
                on_event(number[event.request_id], event)
            add(late)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for request in requests:
            engine.cancel(request.id)
    seconds = time.perf_counter() - started
    for request in requests:
        if request.error is not None and not interrupted:
            raise request.error
    stats, pool, first = engine.stats, engine.pool, statistics.median(waits.values()) if waits else None
    tokens = (stats.new_tokens, sum(map(len, ids)), stats.cached_tokens)
    numbers = Numbers(seconds, stats.steps, *tokens, first, pool.nbytes, engine.kv.num_usable, pool.page_size)
    run = Run([request.completion() for request in requests], numbers)
    if interrupted:
        raise RunInterruptedError(run)
    return run


def _token_ids(llm: LLM, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if llm.tokenizer is None:
        raise ValueError("the model has no tokenizer, so that text cannot be a prompt; give --tokenizer DIR_OR_HUB_ID, or --prompt-ids")
    ids: list[int] = llm.tokenizer(prompt).input_ids
    return ids


def where_it_runs(llm: LLM) -> str:
    """`Qwen3ForCausalLM in bfloat16 on cuda:0 (NVIDIA H200)`"""
    runner = llm.engine.runner
    gpu = f" ({device_name(runner.device)})" if runner.device.type == "cuda" else ""
    return f"{type(runner.model).__name__} in {str(runner.dtype).removeprefix('torch.')} on {runner.device}{gpu}"
