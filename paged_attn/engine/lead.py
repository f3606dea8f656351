"""Requests that reach one rank only: the first rank leads, the others repeat its calls."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from paged_attn.attn_ops.errors import ContextError
from paged_attn.engine.engine import Engine
from paged_attn.engine.llm import LLM
from paged_attn.engine.requests.outputs import TokenEvents
from paged_attn.engine.requests.request import Request
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.parallel.ranks import Ranks

TOLD = ("clear_prefix_cache", "close", "release")  # calls without arguments that all ranks make
IDLE = datetime.timedelta(days=365)  # longest time without any call
# One more group per group of ranks, over gloo. None is destroyed, because no second one could have its name.
_lines: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@contextmanager
def first_rank_leads(llm: LLM) -> Iterator[bool]:
    """Inside, only the first rank uses the LLM, as if it were not sharded; the other ranks repeat its calls, and leave when it does.

    All ranks enter. Yields whether this rank leads; on the others the block begins when the work is over.

    `with first_rank_leads(llm) as leads:` followed by `if leads: llm.generate(...)`

    Raises:
        ContextError: the model is not sharded.
        Any error of a step, on all ranks where it occurred: they cannot continue separately, so let the program end.
        RuntimeError: on the others, when the first rank is gone.
    """
    engine, ranks = llm.engine, llm.engine.runner.ranks
    if ranks is None:
        raise ContextError("first_rank_leads needs a model that is sharded over ranks; this one is whole, use it as it is")
    line = _Line(ranks)
    if ranks.rank != 0:
        engine.input_processor.guides.skips_trial = True
        while (order := line.hear()) is not None:
            name, arguments, keywords = order
            getattr(engine, name)(*arguments, **keywords)
        yield False
        return
    llm.engine = _Leader(engine, line)  # type: ignore[assignment]
    try:
        yield True
    finally:
        llm.engine = engine
        line.say(None)


class _Line:
    """From the first rank to the others, in order."""

    def __init__(self, ranks: Ranks) -> None:
        self.is_cut = False  # the other ranks no longer listen: a call sent from now on would wait forever
        members = dist.get_process_group_ranks(ranks.group)
        self._first = members[0]
        if ranks.group not in _lines:
            _lines[ranks.group] = dist.new_group(members, backend="gloo", timeout=IDLE, use_local_synchronization=True)
        self._group = _lines[ranks.group]

    def say(self, order: Any) -> None:
        if self.is_cut:
            return
        try:
            dist.broadcast_object_list([order], self._first, group=self._group)
        except BaseException:
            self.is_cut = True
            raise

    def check(self) -> None:
        """Raises ContextError: the other ranks no longer listen."""
        if self.is_cut:
            raise ContextError("the other ranks left after an error, so that this one cannot go on alone; start the program again")

    def hear(self) -> Any:
        heard = [None]
        dist.broadcast_object_list(heard, self._first, group=self._group)
        return heard[0]


class _Leader:
    """The engine of the first rank: what changes it is told to the others, too."""

    recovers = False

    def __init__(self, engine: Engine, line: _Line) -> None:
        self._engine, self._line = engine, line

    def __getattr__(self, name: str) -> Any:
        return partial(self._told, name) if name in TOLD else getattr(self._engine, name)

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None, **keywords: Any) -> Request:
        self._line.check()
        _refuse_what_does_not_travel(params, keywords)
        request = self._engine.add_request(prompt_token_ids, params, **keywords)  # requests that it refuses are not passed on
        told = {**keywords, "request_id": request.id}  # they decode what this one does: what cannot be decoded ends a request on all
        self._line.say(("add_request", (request.prompt_token_ids, request.params), told))
        return request

    def cancel(self, request_id: str) -> bool:
        if request_id not in self._engine.requests:
            return False
        self._line.say(("cancel", (request_id,), {}))
        return self._engine.cancel(request_id)

    def step(self) -> TokenEvents:
        self._line.check()
        self._engine.refuse_within_step()
        self._line.say(("step", (), {}))
        try:
            return self._engine.step()
        except BaseException:
            self._line.is_cut = True  # the others had the error, too, and are gone, or they are inside the step
            raise

    def _told(self, name: str) -> Any:
        self._line.say((name, (), {}))
        return getattr(self._engine, name)()


def _refuse_what_does_not_travel(params: SamplingParams | None, keywords: dict[str, Any]) -> None:
    """Raises ValueError: the other ranks cannot be told of it, or would get something else."""
    what = "a request to a model over several ranks is sent to all of them"
    try:
        _, told = pickle.loads(pickle.dumps((params, keywords)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{what}, and this one cannot be pickled: {error}; logits processors must be functions or classes of a module"
        ) from error
    for name in ("namespace", "tenant"):
        if told.get(name) != keywords.get(name):
            raise ValueError(
                f"{what}, and its {name} is {keywords[name]!r}, which is another one there; give a text, a number or a tuple of those"
            )
