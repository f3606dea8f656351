"""A kernel's key in Triton's cache is the same whatever the process asked for before."""

from __future__ import annotations

import json
import os
import subprocess
import sys

KEYS = """
import importlib, json, pkgutil, sys
from triton.runtime import JITFunction
from paged_attn import backends
from paged_attn.backends.compiling.compile_job import settle_key

found = {}
for module in pkgutil.walk_packages(backends.__path__, backends.__name__ + "."):
    if "kernel" in module.name.rsplit(".", 1)[1]:
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction):
                found[f"{value.__module__}.{value.__name__}"] = value
order = sorted(found, reverse=sys.argv[1] == "backwards")
for name in order:
    settle_key(found[name])
print(json.dumps({name: found[name].cache_key for name in sorted(found)}))
"""


def test_keys_do_not_depend_on_the_order() -> None:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    forwards, backwards = (
        json.loads(subprocess.run([sys.executable, "-c", KEYS, order], env=plain, check=True, capture_output=True, text=True).stdout)
        for order in ("forwards", "backwards")
    )
    assert len(forwards) > 30
    assert forwards == backwards
