"""Schemas and grammars that overflow the stack, never end or take all memory are refused, and nobody dies of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from paged_attn import SamplingParams
from paged_attn.engine.sampling.structured import guides
from paged_attn.engine.sampling.structured.compile_process import Limits
from paged_attn.engine.sampling.structured.guides import Guide, Guides
from paged_attn.engine.sampling.structured.trials import DEEP, MAX_DEFINITIONS, MAX_RULES, GuideTrials, check_size
from paged_attn.engine.sampling_params import MAX_GUIDE_BYTES
from tests.engine.models import bytes_tokenizer, make_llm, oracle, tokenizer  # noqa: F401 (in a process of its own)
from tests.server.serving import wait_for

ROOT = Path(__file__).parents[3]
LEAF = {"type": "integer"}


def chain(length: int, link: Any) -> dict[str, Any]:
    """A schema whose definitions lead from one to the next; `link` makes one of a reference to the next."""
    steps = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**steps, f"d{length}": LEAF}}


def refs(length: int) -> dict[str, Any]:
    return chain(length, lambda following: following)


def objects(length: int) -> dict[str, Any]:
    return chain(length, lambda following: {"type": "object", "properties": {"a": following}, "required": ["a"]})


def rules(length: int) -> str:
    return "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} "b"\n' for i in range(length)) + f'r{length}: "a"'


def doubled_terminals(length: int) -> str:
    """A terminal of 2 ** length characters."""
    return "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(length)) + f'T{length}: "a"'


PATTERNS = {"allOf": [{"type": "string", "pattern": f"a.*{chr(97 + i % 26)}.*{i}"} for i in range(60)]}
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "96 KB of references": ({"json_schema": refs(3000)}, "json_schema: got 3001 definitions; allowed: at most 1000"),
    "5,000 rules": ({"grammar": rules(5000)}, "grammar: got 5002 rules; allowed: at most 1000"),
    "as many definitions as there may be": ({"json_schema": objects(MAX_DEFINITIONS - 1)}, DEEP),
    "a large schema": ({"json_schema": {"enum": ["x" * MAX_GUIDE_BYTES]}}, r"allowed: at most 262,144 bytes"),
    "a large expression": ({"regex": "é" * (MAX_GUIDE_BYTES // 2 + 1)}, "regex: got 131,073 characters; allowed: at most 262,144 bytes"),
    "a large grammar": ({"grammar": 'start: "' + "x" * MAX_GUIDE_BYTES + '"'}, "grammar: got 262,153 characters"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused(bomb: str) -> None:
    settings, words = BOMBS[bomb]
    made = Guides(tokenizer(), None, frozenset())
    with pytest.raises(ValueError, match=words):
        made.guide(SamplingParams(**settings))
    made.close()


@pytest.mark.slow
def test_a_process_outlives_all_bombs_and_serves_on() -> None:
    """In a process of its own, as it would not if they were read there."""
    code = (
        "from tests.engine.sampling.test_guide_trials import *\n"
        "llm = make_llm(tokenizer=tokenizer())\n"
        "for settings, words in [*BOMBS.values(), ({'json_schema': PATTERNS}, 'reading it takes more than')]:\n"
        "    with pytest.raises(ValueError, match=words):\n"
        "        llm.generate([3], SamplingParams(**settings))\n"
        "assert llm.generate([3], SamplingParams(max_new_tokens=4))[0].token_ids == oracle([3], 4)\n"
        "assert llm.generate([3], SamplingParams(regex='abc'))[0].text == 'abc'\n"
        "print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]


@pytest.fixture
def trials() -> Iterator[GuideTrials]:
    made = trials_with()
    yield made
    made.close()


def trials_with(**limits: Any) -> GuideTrials:
    return GuideTrials(bytes_tokenizer(), 257, [0], Limits(**limits))


@pytest.mark.parametrize(
    ("limits", "what", "source", "words"),
    [
        ({"stack_bytes": 1 << 20}, "json_schema", json.dumps(objects(300)), DEEP),
        ({"cpu_seconds": 1}, "json_schema", json.dumps(PATTERNS), "reading it takes more than 1 s; simplify it"),
        ({"wall_seconds": 0.3}, "json_schema", json.dumps(PATTERNS), "more than 0.3 s on a machine as busy as this one is now"),
        ({"memory_bytes": 16 << 20}, "grammar", doubled_terminals(17), "reading it takes more than 16 MiB; simplify it"),
        ({"mask_seconds": 1e-9}, "regex", "[a-z]+", "which token may come next takes more than 1e-09 s"),
    ],
    ids=["stack", "time", "wall time", "memory", "masks"],
)
def test_each_limit_holds_and_the_next_trial_runs(limits: dict[str, Any], what: str, source: str, words: str) -> None:
    made = trials_with(**limits)
    with pytest.raises(ValueError, match=words):
        made.run(what, source)
    if "mask_seconds" not in limits:
        assert made.run("regex", "[a-z]{3}").mask_seconds < 0.1
    made.close()


def test_a_trial_tells_the_memory_that_a_guide_takes(trials: GuideTrials) -> None:
    small, large = trials.run("regex", "a"), trials.run("regex", "".join(f"(a|b{i % 7})" for i in range(20_000)))
    assert small.nbytes < 12 << 20 < 16 << 20 < large.nbytes < 200 << 20


def test_a_process_that_was_killed_is_made_anew(trials: GuideTrials) -> None:
    trials.run("regex", "a")
    assert trials._process is not None
    os.kill(trials._process.pid, signal.SIGKILL)
    trials._process.wait()
    assert trials.run("regex", "a")

    process = psutil.Process(trials._process.pid)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(trials.run, "json_schema", json.dumps(PATTERNS))
        wait_for(lambda: bool(process.children()))
        (fork,) = process.children()
        process.kill()
        with pytest.raises(RuntimeError, match="ended with status -9; try again"):
            reading.result()
    wait_for(lambda: not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE)
    assert trials.run("regex", "a")


def test_an_engine_leaves_no_process_behind() -> None:
    before = {child.pid for child in psutil.Process().children()}
    for closes in (True, False):
        llm = make_llm(tokenizer=tokenizer())
        llm.generate([3], SamplingParams(regex="ab"))
        assert {child.pid for child in psutil.Process().children()} > before
        if closes:
            llm.close()
        del llm
        assert {child.pid for child in psutil.Process().children()} == before


def test_who_holds_a_guide_does_not_wait_for_others_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's thread asks for what its server has read before."""
    made = Guides(tokenizer(), None, frozenset())
    monkeypatch.setattr(guides, "MAX_KEPT", 1)
    held = made.prototype(SamplingParams(regex="ab"))
    assert made.guide(SamplingParams(regex="cd")), "it has taken the place of the first one"
    reading, go_on, read = threading.Event(), threading.Event(), made._read

    def slow(*asked: str) -> Guide:
        reading.set()
        go_on.wait(20)
        return read(*asked)

    monkeypatch.setattr(made, "_read", slow)
    other = threading.Thread(target=made.guide, args=(SamplingParams(regex="ef"),))
    other.start()
    reading.wait(20)
    assert held is not None and made.guide(SamplingParams(regex="ab")) is not None and not go_on.is_set()
    go_on.set()
    other.join()
    made.close()


def test_guides_are_kept_by_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Guides(tokenizer(), None, frozenset())
    monkeypatch.setattr(made, "_read", lambda what, source: Guide(None, what, None, 100 << 20))  # type: ignore[arg-type]
    for regex in "abcd":
        made.prototype(SamplingParams(regex=regex))
    assert [source for _, source in made._kept] == ["c", "d"]


DEEP_GUIDES: dict[str, dict[str, Any]] = {
    "objects": {"json_schema": objects(350)},
    "rules": {"grammar": rules(MAX_RULES - 2)},
    "terminals": {"grammar": doubled_terminals(12)},
    "itself": {"grammar": 'start: "(" start ")" | "a" start'},
    "optional": {"regex": "(a" * 80 + ")?" * 80},
    "repeated": {"regex": "(.*a.{300}|.*b.{200}){1,3}"},
}


@pytest.mark.parametrize("name", DEEP_GUIDES)
def test_masks_of_deep_guides(name: str) -> None:
    """As an engine works them out, far into an answer that goes as deep as it can."""
    made = Guides(bytes_tokenizer(), 257, frozenset())
    guide = made.guide(SamplingParams(**DEEP_GUIDES[name]))
    assert guide is not None
    taken = 0
    while taken < 3000 and guide.error is None:
        allowed = np.flatnonzero(np.unpackbits(guides.allowed_next([guide]).numpy().view(np.uint8), bitorder="little"))
        taken += 1
        if not len(allowed) or not guide.goes_on_after(int(allowed[0])):
            break
    assert taken > 50 and (guide.error is None or "too" in guide.error.lower()), guide.error
    made.close()


def test_definitions_and_rules_are_counted_wherever_they_stand() -> None:
    inside = {"properties": {"a": {"definitions": dict.fromkeys(map(str, range(600)), LEAF)}}, "$defs": {key: {} for key in "abc"}}
    check_size("json_schema", json.dumps(inside))
    with pytest.raises(ValueError, match="got 1203 definitions"):
        check_size("json_schema", json.dumps({"anyOf": [inside, {"$defs": inside["properties"]["a"]["definitions"]}]}))
    names = ["start", "?a", "!b", "T.2", "U.-1", "r{x, y}", "  c", "lazy[max_tokens=3]"]
    many = [f'{name}: "x"' for name in names] + [f'r{i} : "y:z" // not: one' for i in range(MAX_RULES - len(names) + 1)]
    check_size("grammar", "\n".join(many[:-1]))
    with pytest.raises(ValueError, match=f"got {MAX_RULES + 1} rules"):
        check_size("grammar", "\n".join(many))
    with pytest.raises(ValueError, match=f"got {MAX_RULES + 1} rules"):
        check_size("grammar", "\n".join(f'a-{i} ::= "x"' for i in range(MAX_RULES + 1)))
