"""A model's code reads numbers from other modules, classes there, and the environment: a kept graph is of no use once they changed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.graph_cache.cached_graphs import CachedGraphs

OPTIONS = CompileOptions(inductor=False)
MODEL = """
import os
import torch, torch.nn.functional as F
from torch import nn
import settings_of_far, package_of_far.numbers
from settings_of_far import Limits, LIMITS, limit

class Model(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embed, self.qkv, self.head = nn.Embedding(64, 16), nn.Linear(16, 48), nn.Linear(16, 64)

    def forward(self, idx):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.embed(idx)).chunk(3, -1))
        rows = torch.arange(idx.shape[1])
        apart = rows[:, None] - rows
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=(apart >= 0) & (apart < WINDOWS[self.how]()))
        return self.head(seen.transpose(1, 2).flatten(-2))

WINDOWS = {
    "a module's variable": lambda: settings_of_far.WINDOW,
    "a package's": lambda: package_of_far.numbers.WINDOW,
    "a class's": lambda: Limits.window,
    "an object's": lambda: LIMITS.window,
    "what a function reads": lambda: limit(),
}

class FromTheEnvironment(Model):
    def __init__(self):
        super().__init__("a module's variable")

    def forward(self, idx):
        return super().forward(idx) * float(os.environ.get("SCALE_OF_FAR", "1"))
"""
SETTINGS = """
WINDOW = 300
class Limits: window = 300
LIMITS = Limits()
def limit(): return WINDOW
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModuleType]]:
    """By name; the files are the same for all tests, since Dynamo takes equal code in two files for one."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "package_of_far").mkdir()
    files = {"package_of_far": "", "settings_of_far": SETTINGS, "package_of_far.numbers": SETTINGS, "model_of_far": MODEL}
    for name, text in files.items():
        (folder / f"{name.replace('.', '/')}{'' if text else '/__init__'}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield {name: importlib.import_module(name) for name in files}
        for name in files:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTN_CACHE", str(tmp_path))


def is_found(model: nn.Module) -> bool:
    kept = CachedGraphs.of(model, OPTIONS, positions=True)
    return kept is not None and kept.find() is not None


# Where each number lies: the module, and the path in it.
NUMBERS = {
    "a module's variable": ("settings_of_far", "WINDOW"),
    "a package's": ("package_of_far.numbers", "WINDOW"),
    "a class's": ("settings_of_far", "Limits.window"),
    "an object's": ("settings_of_far", "LIMITS.window"),
    "what a function reads": ("settings_of_far", "WINDOW"),
}


@pytest.mark.parametrize("how", NUMBERS)
def test_a_number_that_changed_is_seen(modules: dict[str, ModuleType], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = modules["model_of_far"].Model
    TracedRunner(make(how).eval(), OPTIONS)
    assert is_found(make(how).eval())
    module, path = NUMBERS[how]
    monkeypatch.setattr(f"{module}.{path}", 301, raising=False)  # an object's own may stand in its class so far
    assert not is_found(make(how).eval())


def test_what_reads_the_environment_is_not_kept(modules: dict[str, ModuleType]) -> None:
    make = modules["model_of_far"].FromTheEnvironment
    TracedRunner(make().eval(), OPTIONS)
    assert not is_found(make().eval())
