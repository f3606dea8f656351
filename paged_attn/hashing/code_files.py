"""The Python files whose code a trace went through or whose values that code names, and a hash of each file's present content."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch._guards import TracingContext

from paged_attn.hashing.code_text import installed, versioned
from paged_attn.hashing.stable_hasher import Indescribable, StableHasher

# In transformers: the installed packages, which the key lists, in an order that changes from process to process; and what each model class
# created in this process can record, which the class's own file says.
_NOT_EVIDENCE = frozenset({"PACKAGE_DISTRIBUTION_MAPPING", "_CAN_RECORD_REGISTRY"})
_GENERATED = "<string>"  # a dataclass's generated methods: their class is in one of the hashed files
OURS = "paged_attn"  # hashed as sources
_ENVIRONMENT = "<environment>"  # entry that stands for the environment instead of a file
_READS_ENVIRONMENT = frozenset({"environ", "getenv"})
_besides: ContextVar[tuple[frozenset[str], frozenset[str]]] = ContextVar("_besides", default=(frozenset(), frozenset()))


@contextmanager
def executed_files() -> Iterator[set[str]]:
    """The names of all files whose Python code this thread calls inside, complete at the end."""
    found: set[str] = set()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: found.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        yield found
    finally:
        sys.setprofile(before)


@contextmanager
def made_of(files: Iterable[str], generated: Iterable[str]) -> Iterator[None]:
    """Inside, a trace depends on these files, too: code in them was run, and the generated code of these names was made of what it did."""
    token = _besides.set((frozenset(files), frozenset(generated)))
    try:
        yield
    finally:
        _besides.reset(token)


def traced_files() -> frozenset[str] | None:
    """Names of all files that Dynamo's trace, in whose backend we are called, has read code from, and of those whose values that code
    names, without torch's and Python's own.

    None outside of a trace, or where torch does not say.
    """
    codes = TracingContext.get_traced_code() if hasattr(TracingContext, "get_traced_code") else None
    if codes is None:
        return None
    files, generated = _besides.get()
    names = {code.co_filename for code in codes} - generated | files | _read_files(codes)
    return frozenset(name for name in names if not versioned(name) and name != _GENERATED)


def _read_files(codes: Iterable[types.CodeType]) -> set[str]:
    """Files of the modules whose values these codes read by name (`settings.WINDOW`, `package.settings.WINDOW`, a class taken from one).
    Not of what is installed, nor for code that is: a package's version says what it holds."""
    found, theirs = set[str](), [code for code in codes if not versioned(code.co_filename) and not installed(code.co_filename)]
    by_file = _imported() if theirs else {}
    for code in theirs:
        home = by_file.get(code.co_filename)
        if home is None or home.partition(".")[0] == OURS:
            continue
        names = frozenset(code.co_names)
        if names & _READS_ENVIRONMENT:
            found.add(_ENVIRONMENT)
        pending, seen = [sys.modules[home]], set[int]()
        while pending:
            owner = pending.pop()
            seen.add(id(owner))
            for value in (vars(owner)[name] for name in names if name in vars(owner)):
                module = value if isinstance(value, types.ModuleType) else _home_of(value)
                file = getattr(module, "__file__", None)
                if module is None or not isinstance(file, str) or versioned(file) or installed(file):
                    continue
                found.add(file)
                if module is value and id(module) not in seen:
                    pending.append(module)
    return found


def _home_of(value: object) -> types.ModuleType | None:
    """The module of a class, whose attributes are read by name; functions are traced themselves."""
    return sys.modules.get(value.__module__) if isinstance(value, type) else None


def _imported() -> dict[str, str]:
    """Names of imported modules by their files."""
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and isinstance(file := getattr(module, "__file__", None), str):
            found.setdefault(file, name)
    return found


def modules_of(files: Iterable[str]) -> list[str]:
    """Names of the imported modules that lie in these files, sorted. Code that lies in no module, or that reads the environment, is
    indescribable."""
    found = _imported()
    if _ENVIRONMENT in files:
        raise Indescribable("code that reads the environment")
    if homeless := sorted(set(files) - found.keys()):
        raise Indescribable(f"code in {homeless[0]}, which is not an imported module")
    return sorted(found[file] for file in files if found[file].partition(".")[0] != OURS)


def module_digest(name: str) -> str | None:
    """A hash of a module's functions, classes and values as they are now, replaced ones included; None if it is not imported."""
    module = sys.modules.get(name)
    if module is None:
        return None
    hasher = StableHasher({}, strict=False, inside=name)
    # Names with two underscores are Python's own, and those that Dynamo puts there while it traces.
    names = [key for key in sorted(vars(module)) if not key.startswith("__") and key not in _NOT_EVIDENCE]
    lines = [f"{key}={hasher.text(vars(module)[key])}" for key in names]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
