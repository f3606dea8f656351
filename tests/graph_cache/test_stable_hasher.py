"""Two values have the same text exactly if code cannot tell them apart; and the text is the same in every process."""

from __future__ import annotations

import collections
import enum
import functools
import subprocess
import sys
import threading
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paged_attn import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.hashing import stable_hasher
from paged_attn.hashing.code_text import code_digest, versioned
from paged_attn.hashing.stable_hasher import Indescribable, StableHasher, tensor_digest

ROOT = Path(__file__).parents[2]


def text(value: Any, strict: bool = True, **modules: Any) -> str:
    return StableHasher({id(module): path for path, module in modules.items()}, strict).text(value)


def function(body: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(f"def f(x, y=1):\n{body}", "<test>", "exec"), names)
    return names["f"]


def closing_over(value: Any) -> Any:
    return lambda: value


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Point:
    x: Any = 0
    rest: list[Any] = field(default_factory=list)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a


class Nosy(dict[str, Any]):
    """Whose items no reader may ask it for."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("its own code ran")

    __iter__ = items = keys = values = __getitem__  # type: ignore[assignment]


ALIKE = [
    lambda: 3, lambda: "text", lambda: [1, (2.5, None)], lambda: {"a": {1, 2, 3}}, lambda: torch.float16, lambda: torch.device("cpu"),
    lambda: torch.arange(5.0), lambda: Point(1, [2]), lambda: Slotted(3), lambda: Color.RED, lambda: functools.partial(max, 3),
    lambda: function("  return x + y"), lambda: function("\n  # a comment\n  return x + y"), lambda: collections.OrderedDict(a=1),
    lambda: torch.nn.functional.silu, lambda: torch.cat, lambda: types.SimpleNamespace, lambda: Nosy(a=1), lambda: closing_over(3),
    lambda: function("  return {'b', 'a', 'c'} > {y}"), lambda: torch.ops.aten.add.Tensor,
]  # fmt: skip


@pytest.mark.parametrize("make", ALIKE)
def test_equal_values_have_equal_texts(make: Any) -> None:
    assert text(make()) == text(make())


def shared() -> Any:
    inner = [1]
    return [inner, inner]


DIFFERENT = [
    (1, True), (1, 1.0), ("1", 1), ([1], (1,)), ({1: 2}, {1: 3}), ({"a": 1}, {"b": 1}), (torch.float16, torch.bfloat16), (None, False),
    (torch.zeros(3), torch.zeros(4)), (torch.zeros(3), torch.ones(3)), (torch.zeros(3), torch.zeros(3).double()),
    (Point(1), Point(2)), (Point(0, [1]), Point(0, [2])), (Slotted(1), Slotted(2)), (Color.RED, Color.BLUE), (0.1, 0.1 + 1e-16),
    (function("  return x + y"), function("  return x - y")), (function("  return x + 1"), function("  return x + 2")),
    (function("  return lambda: 1"), function("  return lambda: 2")), (function("  return x.a"), function("  return x.b")),
    (closing_over(3), closing_over(4)), (closing_over([3]), closing_over([4])), (functools.partial(max, 3), functools.partial(max, 4)),
    (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)), (Nosy(a=1), Nosy(a=2)), (Nosy(a=1), {"a": 1}),
    (shared(), [[1], [1]]), (torch.cat, torch.stack), (nn.functional.silu, nn.functional.gelu), (functools.lru_cache(max), max),
    (collections.defaultdict(list), collections.defaultdict(dict)), (Point().__init__, Point(1).__init__), (-0.0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("pair", DIFFERENT, ids=range(len(DIFFERENT)))
def test_others_have_others(pair: tuple[Any, Any]) -> None:
    assert text(pair[0]) != text(pair[1])


def test_defaults_of_a_function_count() -> None:
    one, other = function("  return x"), function("  return x")
    other.__defaults__ = (2,)
    assert text(one) != text(other)


def test_a_cycle_ends() -> None:
    point = Point()
    point.rest.append(point)
    assert text(point) == text(point) and "#" in text(point)


def test_modules_are_told_by_their_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    paths = {"0": model[0], "1": model[1]}
    assert text([model[0]], **paths) != text([model[1]], **paths)
    with pytest.raises(Indescribable, match="Linear"):
        text(nn.Linear(2, 2), **paths)


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(), object(), torch.Generator(), iter([1]), nn.Parameter(torch.zeros(2)), torch.zeros(2, device="meta"),
        torch.zeros(1 << 19), torch.eye(2).to_sparse(), {object()}, [threading.Lock()], closing_over(threading.Lock()), Point(object()),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_can_not_be_told_is_refused_or_named(value: Any) -> None:
    with pytest.raises(Indescribable):
        text(value)
    assert text(value, strict=False) == text(value, strict=False)


def test_engines_and_tensors_without_memory_are_named_and_not_read() -> None:
    """A script's variables have them beside its model: an engine, and what is left of a closed one, whose memory cannot be read."""
    gone = torch.ones(8)
    gone.untyped_storage().resize_(0)
    layer = AttentionSpec(2, 1, 8, 8, 0.5)
    assert text(gone, strict=False).startswith("Tensor torch.float32 cpu (8,)")
    assert text(KVPool([layer], 2, 4, torch.float32), strict=False) == "some paged_attn.attn_ops.kv.kv_pool.KVPool"
    assert "num_q_heads=int 2" in text(layer, strict=False)


def test_of_other_files_only_the_own_code_counts() -> None:
    hasher = StableHasher({}, False, inside="somewhere")
    assert hasher.text(closing_over(3)) == StableHasher({}, False, inside="somewhere").text(closing_over(4))
    assert hasher.text(Point).endswith("Point")
    here = StableHasher({}, False, inside=__name__)
    assert here.text(closing_over(3)) != StableHasher({}, False, inside=__name__).text(closing_over(4))


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stable_hasher, "_MOST_VALUES", 300)
    with pytest.raises(Indescribable, match="more than 300 values"):
        text([[] for _ in range(301)])


def test_tensors_of_every_dtype_have_a_digest() -> None:
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        assert tensor_digest(torch.ones(3).to(dtype)) != tensor_digest(torch.zeros(3).to(dtype))
    assert tensor_digest(torch.tensor(2.0)) == tensor_digest(torch.tensor(2.0)) and tensor_digest(torch.zeros(0))
    table = torch.arange(6).view(2, 3)
    assert tensor_digest(table.T) == tensor_digest(table.T.contiguous())


def test_versioned_files() -> None:
    assert versioned(torch.nn.modules.linear.__file__) and versioned(collections.__file__) and versioned("<frozen os>")
    assert not versioned(__file__) and not versioned(pytest.__file__)


def test_the_text_is_the_same_in_another_process() -> None:
    code = "from tests.graph_cache.test_stable_hasher import *\nprint(*[text(make(), False) for make in ALIKE], sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": "5"}, capture_output=True, text=True)
    there = done.stdout.replace("tests.graph_cache.test_stable_hasher", __name__).splitlines()
    assert there == [text(make(), False) for make in ALIKE], done.stderr[-1000:]


def test_lines_and_files_do_not_count() -> None:
    body = "  return [x for x in range(y)]"
    assert code_digest(function(body).__code__) == code_digest(function("\n\n" + body).__code__)
