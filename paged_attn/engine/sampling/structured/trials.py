"""Limits the size of schemas and grammars, and parses them on trial in another process, before this one parses them."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from paged_attn.engine.sampling.structured import compile_process
from paged_attn.engine.sampling.structured.compile_process import Limits, is_gbnf

MAX_DEFINITIONS = 1000  # in one JSON schema, including nested schemas
MAX_RULES = 1000  # in one grammar, including terminals
_RULE = re.compile(r"^[ \t]*[?!]?\w+(?:\.[+-]?\d+)?(?:\{[^}\n]*\}|\[[^]\n]*\])?[ \t]*:", re.MULTILINE)
LIMITS = Limits()
DEEP = "too many definitions or rules lead from one to the next"


def check_size(what: str, source: str) -> None:
    """Raises ValueError: too many definitions or rules. `SamplingParams` has counted the bytes."""
    if what == "json_schema" and (count := sum(_definitions(json.loads(source)))) > MAX_DEFINITIONS:
        raise ValueError(f"json_schema: got {count} definitions; allowed: at most {MAX_DEFINITIONS}; leave out what no answer needs")
    if what == "grammar" and (count := source.count("::=") if is_gbnf(source) else len(_RULE.findall(source))) > MAX_RULES:
        raise ValueError(f"grammar: got {count} rules; allowed: at most {MAX_RULES}; write several as one")


def _definitions(schema: Any) -> Iterator[int]:
    """How many each place has where definitions stand."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield from (len(held) for name in ("$defs", "definitions") if isinstance(held := value.get(name), dict))
            left += value.values()
        elif isinstance(value, list):
            left += value


class Trial(NamedTuple):
    """What reading a source took: memory, and CPU seconds of the slowest of its masks; and the source as `as_grammar` has it."""

    nbytes: int
    mask_seconds: float
    grammar: str


class GuideTrials:
    """One process that reads guides, each in a fork of its own; it starts with the first one. For one thread at a time.

    Who reads it here afterwards has a stack many times as large.

    Args:
        tokenizer: a fast one of transformers.
        vocab_size, eos: as llguidance's `LLTokenizer` takes them.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos: list[int], limits: Limits = LIMITS) -> None:
        backend = copy.copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        self._given = {"tokenizer": backend.to_str(), "vocab_size": vocab_size, "eos": eos, "limits": limits._asdict()}
        self.limits = limits
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = lambda: None
        self._owner = 0  # pid of the process that started it; a fork starts its own

    def run(self, what: str, source: str) -> Trial:
        """Read a source where that can harm nobody. Raises ValueError: it cannot be read, or not within the limits; RuntimeError: the
        process that reads could not be started, or was ended from outside."""
        process = self._running()
        told = _ask(process, {"what": what, "source": source})
        if "error" in told:
            raise ValueError(told["error"])
        if "killed_by" in told:
            raise ValueError(f"{self._died_of(told['killed_by'])}; simplify it")
        trial = Trial(**told)
        if trial.mask_seconds > self.limits.mask_seconds:
            raise ValueError(f"finding out which token may come next takes more than {self.limits.mask_seconds:g} s; simplify it")
        return trial

    def close(self) -> None:
        """End the process; the next trial starts another."""
        self._end()
        self._process = None

    def _died_of(self, number: int) -> str:
        """In words, what a fork did that was ended by a signal."""
        if number in (signal.SIGSEGV, signal.SIGBUS):
            return DEEP
        if number == signal.SIGABRT:
            return f"reading it takes more than {self.limits.memory_bytes >> 20} MiB"
        if number == signal.SIGALRM:
            return f"reading it takes more than {self.limits.wall_seconds:g} s on a machine as busy as this one is now"
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return f"reading it takes more than {self.limits.cpu_seconds} s"
        return f"reading it ends the process that does so with signal {number}"

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.close()
            self._owner = os.getpid()
            # As this process would import: a checkout, a venv, a PYTHONPATH. -P: names of our files are not names of modules.
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RUST_BACKTRACE": "0"}
            command = [sys.executable, "-P", compile_process.__file__]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=environment, start_new_session=True,  # Ctrl-C is not for it, and it can be ended with what it forks
            )  # fmt: skip
            self._process, self._end = process, weakref.finalize(self, _end, process, self._owner)
            _ask(process, self._given)
        return self._process


def _ask(process: subprocess.Popen[str], message: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        _end(process, os.getpid())
        raise RuntimeError(f"the process that reads schemas and grammars ended with status {process.returncode}; try again")
    told: dict[str, Any] = json.loads(line)
    return told


def _end(process: subprocess.Popen[str], owner: int) -> None:
    if owner != os.getpid():
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # including its forks
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # data that was still buffered
            if pipe is not None:
                pipe.close()
