"""Parses schemas and grammars, in this process and on trial. Run as a script, this file forks a process for each source, so that a source
that overflows the stack, never ends or takes all memory does no harm. Imports only llguidance and Python's own; see `GuideTrials`."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from typing import Any, NamedTuple

# Between tokens of JSON; without a bound a weak model goes on with line ends for ever.
JSON_DEFAULTS: Any = {"whitespace_pattern": r" |\n {0,40}"}
LEXER_FUEL = 250_000  # nodes of all expressions: a quarter of llguidance's own limit, which takes 270 MiB and masks of 120 ms
LEXER_STATES = 50_000  # each takes 1 to 2 kB
SHOWN_LINE, SHOWN_ERROR = 200, 500  # characters

WALKED_TOKENS = 48
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)


class Limits(NamedTuple):
    """What reading one source may take.

    Attributes:
        stack_bytes: 4 MiB are some 400 definitions or rules that lead from one to the next.
        mask_stack_bytes: where masks are worked out; half of what llguidance's own threads have, which do so for an engine.
        memory_bytes: beyond what the process has before it reads.
        mask_seconds: of CPU time, for the next token of one request.
    """

    stack_bytes: int = 4 << 20
    mask_stack_bytes: int = 1 << 20
    memory_bytes: int = 512 << 20
    cpu_seconds: int = 5
    wall_seconds: float = 60.0
    mask_seconds: float = 0.1


def as_grammar(what: str, source: str) -> str:
    """A source in llguidance's own form. `what`: "json_schema", "regex" or "grammar". Raises ValueError: a grammar of llama.cpp's form is
    none; in llguidance's words."""
    from llguidance import LLMatcher, grammar_from

    if what == "json_schema":
        ours = None if "x-guidance" in json.loads(source) else JSON_DEFAULTS
        return str(LLMatcher.grammar_from_json_schema(source, defaults=ours))
    return grammar_from("regex" if what == "regex" else "gbnf" if is_gbnf(source) else "lark", source)


def read_matcher(tokens: Any, grammar: str) -> Any:
    """The `LLMatcher` of what `as_grammar` has made, with its first mask computed. `tokens`: an `LLTokenizer`. Raises ValueError:
    llguidance cannot read it, or no answer follows it; in its own words."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, max_lexer_states=LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()  # may take a second, and is where some turn out to be too large, or to allow nothing
    if matcher.is_error():
        raise ValueError(error_of(matcher))
    return matcher


def is_gbnf(grammar: str) -> bool:
    """Whether its rules are written as llama.cpp has them (vLLM and SGLang call it EBNF), not as Lark has them."""
    return _GBNF_RULE.search(grammar) is not None


def error_of(matcher: Any) -> str:
    """The error of a matcher in a few words: without the states, grammars and backtraces that are printed behind it."""
    text: str = matcher.get_error()
    for mark in ("<state>", "<grammar>", "<non-verbose/>", "stack backtrace", "Stack backtrace"):
        text = text.partition(mark)[0]
    if (text := text.strip()) == "NoExtensionBias":
        return "no answer can follow it"
    lines = [line if len(line) <= SHOWN_LINE else f"{line[:SHOWN_LINE]}..." for line in text.splitlines() if line.strip(" ^")]
    told = [*lines[:2], *(line for line in lines[2:] if line.startswith("error"))]
    return "\n".join(told)[:SHOWN_ERROR]


def _walk(matcher: Any) -> float:
    """Follow an answer at random; the CPU seconds of the slowest mask."""
    chance, slowest = random.Random(0), 0.0
    for _ in range(WALKED_TOKENS):
        started = time.thread_time()
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        slowest = max(slowest, time.thread_time() - started)
        if matcher.is_error() or not bits:
            break
        matcher.consume_token(_some_bit(bits, chance))
        if matcher.is_stopped():
            break
    return slowest


def _walk_on_a_stack_of(stack_bytes: int, matcher: Any) -> float:
    slowest: list[float] = []
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=lambda: slowest.append(_walk(matcher)))
    thread.start()
    thread.join()
    return slowest[0]


def _some_bit(bits: int, chance: random.Random) -> int:
    """The first set bit at or above a random one, or the lowest."""
    above = bits >> (start := chance.randrange(bits.bit_length()))
    return start + (above & -above).bit_length() - 1 if above else (bits & -bits).bit_length() - 1


def _try(tokens: Any, what: str, source: str, limits: Limits, answer: int) -> None:
    """In a process of its own: write what became of the source to a pipe, if it lives to tell."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (limits.stack_bytes, limits.stack_bytes))
    resource.setrlimit(resource.RLIMIT_AS, (_bytes(0) + limits.memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
    before = _bytes(1)
    try:
        matcher = read_matcher(tokens, grammar := as_grammar(what, source))
        slowest = _walk_on_a_stack_of(limits.mask_stack_bytes, matcher)
        result: dict[str, Any] = {"nbytes": max(_bytes(1) - before, 0), "mask_seconds": slowest, "grammar": grammar}
    except ValueError as error:
        result = {"error": str(error)}
    os.write(answer, json.dumps(result).encode())


def _bytes(column: int) -> int:
    """Bytes of this process: 0 all that is mapped, 1 what is in memory."""
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[column]) * resource.getpagesize()


def _in_a_fork(tokens: Any, what: str, source: str, limits: Limits) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.closerange(0, 2)  # otherwise whoever waits for this process would also wait for its fork
            _try(tokens, what, source, limits, writing)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as told:
        result = told.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(result) if result else {"killed_by": -status}


def main() -> None:
    """A line of JSON with the tokenizer and the limits, and then one for each source; a line of JSON comes back for each."""
    from llguidance import LLTokenizer

    def tell(result: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()

    given = json.loads(sys.stdin.readline())
    tokens = LLTokenizer(given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["eos"])
    limits = Limits(**given["limits"])
    tell({})
    for line in sys.stdin:
        asked = json.loads(line)
        tell(_in_a_fork(tokens, asked["what"], asked["source"], limits))


if __name__ == "__main__":
    main()
