"""A file that somebody else has put into the cache: nothing that it names is called, and nothing in it becomes code."""

from __future__ import annotations

import copy
import json
import logging
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.graph_cache.allowed_calls import ATTRIBUTES, FUNCTIONS, METHODS, MODULES
from paged_attn.graph_cache.cached_graphs import CachedGraphs
from paged_attn.graph_cache.entries import VARIABLE, Entries, _head
from paged_attn.graph_cache.graph_data import graph_data, graph_of
from paged_attn.hashing.stable_hasher import Indescribable
from tests.graph_cache.test_cached_graphs import OPTIONS, mistral
from tests.graph_cache.test_graph_data import CALLS, CPU, graph

REFUSED = (ValueError, LookupError, TypeError, AttributeError, RuntimeError)
MARK = "somebody_was_here"
COMMAND = f"open('{MARK}', 'w').close()"
FUNCTION_TARGETS = [
    ["function", "torch", "os.system"], ["function", "torch", "sys.modules"], ["function", "torch", "load"], ["function", "torch", "save"],
    ["function", "torch", "utils.cpp_extension.load_inline"], ["function", "torch.utils.cpp_extension", "load_inline"],
    ["function", "torch.hub", "load"], ["function", "torch", "from_file"], ["function", "torch", "compile"],
    ["function", "torch", "_from_blob"],
    ["function", "torch", "classes"], ["function", "torch", "__builtins__"], ["function", "torch._C", "_cuda_resetAccumulatedMemoryStats"],
    ["function", "torch.nn.functional", "importlib.import_module"], ["function", "torch.nn.functional", "boolean_dispatch"],
    ["function", "torch.nn.functional", "handle_torch_function"], ["function", "torch._C._nn", "__loader__"],
    ["function", "_operator", "call"], ["function", "_operator", "attrgetter"], ["function", "_operator", "methodcaller"],
    ["function", "_operator", "__builtins__"], ["function", "builtins", "exec"], ["function", "builtins", "eval"],
    ["function", "builtins", "open"], ["function", "builtins", "setattr"], ["function", "builtins", "type"], ["function", "os", "system"],
    ["function", "math", "__loader__"], ["function", "subprocess", "run"], ["class", "torch", "rsqrt"], ["function", "torch"], [],
    ["op", "aten", "from_file", "default", "x"], ["op", "aten", "save", "", "x"], ["op", "__class__", "mro", ""],
    ["op", "aten", "__init__", ""],
    ["op", "loaded_libraries", "add", ""], ["op", "load_library", "__call__", ""], ["op", "higher_order", "cond", ""],
]  # fmt: skip
METHOD_TARGETS = [
    "apply_", "map_", "numpy", "data_ptr", "set_", "register_hook", "backward", "storage", "__class__", "__reduce__", "_make_subclass",
    "format", "system", "to().__class__", f"sum(); {COMMAND}; x.sum", "su m", 3, None,
]  # fmt: skip
NAMES = [f"x={COMMAND}", f"x, y=__import__('os').system('touch {MARK}')", "x)\n    import os", "class", "__debug__", "ｘ", "", 5]


def data_of(*calls: Any, **buffers: Any) -> Any:
    return json.loads(json.dumps(graph_data(graph(*calls, buffers=buffers or None))))


def refuses(data: Any) -> None:
    """It is not made, or it is made and calls nothing else when it runs."""
    with pytest.raises(REFUSED):
        graph_of(data, CPU)(torch.ones(2))
    assert not Path(MARK).exists()


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def with_real_schemas(target: list[str]) -> list[str]:
    """An op's own schemas, so that it is not these by which it is refused."""
    if target[:1] != ["op"] or target[1] != "aten" or target[2] == "__init__":
        return target
    packet = getattr(torch.ops.aten, target[2])
    overloads = [getattr(packet, target[3])] if target[3] else [getattr(packet, name) for name in packet.overloads()]
    return [*target[:4], *(str(overload._schema) for overload in overloads)]


@pytest.mark.parametrize("target", FUNCTION_TARGETS, ids=map(str, FUNCTION_TARGETS))
@pytest.mark.parametrize("where", ["target", "value"])
def test_no_other_function_is_called(target: list[str], where: str) -> None:
    data = data_of((torch.rsqrt, (...,), {}))
    if where == "target":
        data["nodes"][1][2] = with_real_schemas(target)
    else:
        data["nodes"][1][4] = {"dict": [["out", {"function": with_real_schemas(target)}]]}
    refuses(data)


@pytest.mark.parametrize("target", METHOD_TARGETS, ids=map(str, METHOD_TARGETS))
def test_no_other_method_is_called(target: Any) -> None:
    data = data_of(("sum", (...,), {}))
    data["nodes"][1][2] = target
    refuses(data)


def test_methods_are_those_of_results_and_not_of_what_a_file_says() -> None:
    data = data_of(("sum", (...,), {}))
    data["nodes"][1][3] = {"tuple": ["{0.__class__.__init__.__globals__}"]}
    refuses(data)


@pytest.mark.parametrize("name", NAMES, ids=map(repr, NAMES))
@pytest.mark.parametrize("place", ["placeholder", "node", "keyword", "buffer"])
def test_no_name_becomes_code(name: Any, place: str) -> None:
    data = data_of((torch.rsqrt, (...,), {}), table=torch.ones(2))
    if place == "placeholder":
        data["nodes"][0][2] = name
    elif place == "node":
        data["nodes"][1][1] = name
    elif place == "keyword":
        data["nodes"][3][4] = {"dict": [[name, 1]]}
    else:
        data["buffers"][name] = data["buffers"].pop("table")
        data["nodes"][1][2] = name
    refuses(data)


@pytest.mark.parametrize("name", ["forward", "__class__", "table.__class__", "_buffers", "no"])
def test_no_other_attribute_of_the_graph_is_read(name: str) -> None:
    data = data_of((torch.rsqrt, (...,), {}), table=torch.ones(2))
    data["nodes"][1][2] = name
    refuses(data)


@pytest.mark.parametrize("name", ["__class__", "grad_fn", "__init__", "_backward_hooks", "numpy", "T.__class__", 5])
def test_no_other_attribute_of_a_result_is_read(name: Any) -> None:
    data = data_of((getattr, (..., "shape"), {}))
    data["nodes"][1][3]["tuple"][1] = name
    refuses(data)


@pytest.mark.parametrize("of", ["text", {"function": ["function", "torch", "rsqrt"]}, {"tuple": []}])
def test_nor_of_what_is_no_result(of: Any) -> None:
    data = data_of((getattr, (..., "shape"), {}))
    data["nodes"][1][3]["tuple"][0] = of
    refuses(data)


@pytest.mark.parametrize("kind", ["call_module", "root", "exec", None])
def test_no_other_kind_of_node_is_made(kind: Any) -> None:
    data = data_of((torch.rsqrt, (...,), {}))
    data["nodes"][1][0] = kind
    refuses(data)


def test_arguments_of_inputs_are_not_code_either() -> None:
    data = data_of((torch.rsqrt, (...,), {}))
    data["nodes"][0][3] = {"tuple": [{"function": ["function", "torch", "rsqrt"]}]}
    refuses(data)


@pytest.mark.parametrize("call", [*CALLS, (getattr, (..., "mT"), {}), (F.gelu, (...,), {"approximate": "tanh"})])
def test_what_graphs_call_is_allowed(call: Any) -> None:
    assert graph_of(json.loads(json.dumps(graph_data(graph(call)))), CPU).code == graph(call).code


@pytest.mark.parametrize(
    "call", [(getattr, (..., "grad_fn"), {}), ("apply_", (..., 1), {}), (operator.call, (...,), {}), (torch.load, (...,), {})]
)
def test_what_would_be_refused_is_not_written(call: Any) -> None:
    with pytest.raises(Indescribable):
        graph_data(graph(call))


def test_the_tables_hold_computations_only() -> None:
    """Every name leads to a function or class, none to a module, and by none of them one gets at anything else."""
    for module, names in FUNCTIONS.items():
        for name in names:
            assert callable(getattr(MODULES[module], name)) and "." not in name and not name.startswith("__"), (module, name)
    bad = {"load", "save", "system", "exec", "eval", "open", "compile", "call", "methodcaller", "attrgetter", "itemgetter", "from_file"}
    assert not bad & set().union(*FUNCTIONS.values()) and not any(name.startswith("_") for name in METHODS | ATTRIBUTES)


def leaves(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a record, as (container, key)."""
    found: list[tuple[Any, Any]] = []
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    for key, each in items:
        found.append((value, key))
        found += leaves(each)
    return found


REAL = data_of(
    (torch.add, (..., 2), {"alpha": 3}), ("to", (...,), {"dtype": torch.float64}), (getattr, (..., "T"), {}), table=torch.ones(2)
)
WEIRD = st.sampled_from([
    None, True, -1, 10**12, 1e308, "", "x", "__class__", "os.system", [], {}, ["function", "torch", "os.system"], {"node": 99},
    {"tuple": 5}, {"function": ["op", "aten", "save", ""]}, {"dtype": "torch.os"}, {"device": "x"}, {"ellipsis": 0}, {"nothing": 1},
    [[]], "call_method", "\0",
])  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), WEIRD, st.booleans()), min_size=1, max_size=3))
def test_a_record_of_anything_is_refused_or_harmless(changes: list[tuple[int, Any, bool]]) -> None:
    data = copy.deepcopy(REAL)
    for number, value, deletes in changes:
        if not (places := leaves(data)):
            break
        container, key = places[number % len(places)]
        if deletes:
            del container[key]
        else:
            container[key] = copy.deepcopy(value)
    try:
        made = graph_of(data, CPU)
    except REFUSED:
        return
    for node in made.graph.nodes:
        if node.op == "call_function":
            assert node.target in {torch.add, getattr} or callable(node.target)
            assert getattr(node.target, "__module__", "").partition(".")[0] in ("torch", "builtins", "_operator", "math")
        assert node.op != "call_method" or node.target in METHODS


def planted(folder: Path, change: Callable[[Any], None]) -> None:
    """The graph of `mistral()`, changed by somebody who knows how checksums are made."""
    (path,) = folder.joinpath("graphs").glob("*.graph")
    head, _, body = path.read_bytes().partition(b"\n")
    record = json.loads(body)
    change(record)
    body = json.dumps(record).encode()
    path.write_bytes(_head(head.decode().split()[0], body).encode() + b"\n" + body)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder))
        TracedRunner(mistral(), OPTIONS)
    return folder


@pytest.fixture
def cache(traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy for each test."""
    folder = tmp_path / "cache"
    folder.joinpath("graphs").mkdir(parents=True, mode=0o700)
    for file in traced.joinpath("graphs").iterdir():
        folder.joinpath("graphs", file.name).write_bytes(file.read_bytes())
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def is_found() -> bool:
    kept = CachedGraphs.of(mistral(), OPTIONS, True)
    return kept is not None and kept.find() is not None


def shell_command(record: Any) -> None:
    nodes = record["graph"]["nodes"]
    number = next(i for i, node in enumerate(nodes) if node[0] == "call_function")
    nodes[number][2:5] = [["function", "torch", "os.system"], {"tuple": [f"touch {MARK}"]}, {"dict": []}]


def in_a_keyword(record: Any) -> None:
    node = next(node for node in record["graph"]["nodes"] if node[0] == "call_function")
    node[4] = {"dict": [[f"x=__import__('os').system('touch {MARK}'), y", 1]]}


RECORDS: list[Callable[[Any], Any]] = [
    shell_command, in_a_keyword, lambda record: record.pop("evidence"), lambda record: record.pop("graph"), lambda record: record.clear(),
    lambda record: record.update(evidence=5), lambda record: record.update(inputs=[]), lambda record: record.update(layers=None),
    lambda record: record["graph"].update(buffers={"x": {"dtype": "torch.float32", "shape": [10**12], "bytes": ""}}),
    lambda record: record.update(pieces=[{"fingerprint": "../../x"}]), lambda record: record["graph"]["nodes"].clear(),
]  # fmt: skip


@pytest.mark.parametrize("change", RECORDS, ids=range(len(RECORDS)))
def test_a_planted_file_is_left_and_the_model_is_traced(cache: Path, change: Callable[[Any], Any]) -> None:
    assert is_found()
    planted(cache, change)
    assert not is_found() and not Path(MARK).exists()


def test_a_planted_file_runs_no_command_when_a_model_starts(cache: Path) -> None:
    planted(cache, shell_command)
    runner = TracedRunner(mistral(), OPTIONS)
    assert runner.compiled.original is not None, "it was traced"
    assert not Path(MARK).exists() and is_found(), "and the new graph has taken its place"


@pytest.mark.parametrize("content", [b"x\n" + b"[" * 100_000, b"", b"\n"])
def test_a_file_of_anything_is_left(cache: Path, content: bytes) -> None:
    (path,) = cache.joinpath("graphs").glob("*.graph")
    key = path.name.partition("-")[0]
    body = content.partition(b"\n")[2]
    path.write_bytes(_head(key, body).encode() + b"\n" + body)
    assert not is_found()


def test_a_pipe_or_a_device_in_the_folder_hangs_no_start(cache: Path) -> None:
    """In a process of its own, which is ended if it hangs."""
    (path,) = cache.joinpath("graphs").glob("*.graph")
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    for number, kind in enumerate(("/dev/zero", "/dev/tty", str(path))):
        path.with_name(f"{path.name.partition('-')[0]}-{number}.graph").symlink_to(kind)
    path.with_name(f"{path.name.partition('-')[0]}-folder.graph").mkdir()
    code = "from tests.graph_cache.test_planted_graphs import *; print(is_found())"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=100)
    assert done.stdout == "False\n", done.stderr[-2000:]
    path.unlink()
    path.write_bytes(content)
    assert is_found(), "the good one among them is used"


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


@pytest.mark.parametrize("which", ["folder", "parent"])
@pytest.mark.parametrize("mode", [0o777, 0o722])
def test_a_folder_that_others_can_write_is_not_used(
    cache: Path, which: str, mode: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("paged_attn"), "propagate", True)
    assert is_found()
    place = cache / "graphs" if which == "folder" else cache
    place.chmod(mode)
    assert CachedGraphs.of(mistral(), OPTIONS, True) is None
    assert f"others can write to {place} (mode {mode:o}); run `chmod go-w {place}`" in said(caplog) and VARIABLE in said(caplog)
    place.chmod(0o700)
    assert is_found()


def test_a_file_that_others_can_write_is_not_read(cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("paged_attn"), "propagate", True)
    (path,) = cache.joinpath("graphs").glob("*.graph")
    path.chmod(0o666)
    assert not is_found() and "may have been written by others (mode 666); remove it" in said(caplog)


def test_folders_are_made_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = Entries(tmp_path / "a" / "b" / "graphs")
        assert store.write("k", "e", {"x": 1}) is not None
    finally:
        os.umask(before)
    assert all(place.stat().st_mode & 0o77 == 0 for place in (store.folder, store.folder.parent, store.folder.parent.parent))
    assert [record for _, record in store.read("k")] == [{"x": 1}]


def test_a_graph_module_of_fx_still_runs() -> None:
    made = graph_of(data_of((torch.rsqrt, (...,), {})), CPU)
    assert isinstance(made, fx.GraphModule) and isinstance(made, nn.Module) and torch.equal(made(torch.ones(2))[0], torch.ones(2))
