"""Python code as text that is the same in every process and changes with the code, except for comments and empty lines."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent)
_PYTHON = sysconfig.get_paths()["stdlib"]
_PACKAGES = ("site-packages", "dist-packages")


@functools.lru_cache(maxsize=1 << 14)  # a start asks for the same thousand of functions two or three times, and so does the next one
def code_digest(code: CodeType) -> str:
    """A hash of bytecode, names and constants, nested code included. Its lines, and the file that it lies in, do not count."""
    return hashlib.sha256(_code(code).encode()).hexdigest()


def versioned(filename: str) -> bool:
    """Whether a file belongs to torch or to Python itself, whose versions say all."""
    if filename.startswith(("<frozen ", _TORCH)):
        return True
    return filename.startswith(_PYTHON) and not installed(filename)


def installed(filename: str) -> bool:
    """Whether a file belongs to an installed package, whose version says what it holds."""
    return any(part in filename for part in _PACKAGES)


def _code(code: CodeType) -> str:
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    numbers = (code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    return f"{code.co_name} {numbers} {code.co_code.hex()} {code.co_exceptiontable.hex()} {names} {_constant(code.co_consts)}"


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return f"code({_code(value)})"
    if isinstance(value, tuple):
        return f"({','.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(_constant, value)))}}}"  # sorted: set order differs between processes
    return f"{type(value).__name__} {value!r}"
