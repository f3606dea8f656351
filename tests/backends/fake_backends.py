"""A machine that is not here: a device, its architecture, what is installed, and fake backends under the registered names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.capabilities import Capabilities, Feature
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.needs import Requirement
from paged_attn.backends.selection import registry, requirements
from paged_attn.backends.selection.requirements import Requirements
from paged_attn.backends.selection.select import Selection, select

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
PLAIN = Capabilities(devices=frozenset({"cuda"}), dtypes=DTYPES, kv_dtypes=DTYPES, features=frozenset(Feature) - {Feature.DETERMINISTIC})
SPEC = AttentionSpec(32, 8, 128, 128, 0.1)


@dataclass
class Entry:
    """What `EntryPoint` is to the registry."""

    name: str
    loaded: Any
    value: str = "fake:Class"

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def fake(backend_name: str, capabilities: Capabilities = PLAIN, error: Exception | None = None) -> type[AttentionBackend]:
    """A backend with these capabilities; `error` is what making it raises."""

    class Fake(ReferenceBackend):
        name = backend_name

        def __init__(self, *, deterministic: bool = False) -> None:
            if error is not None:
                raise error
            super().__init__(deterministic=deterministic)

    Fake.capabilities = capabilities
    return Fake


class Machine:
    """By default a Hopper GPU on which every backend of this project's list fits, but those for latents alone; no package is missing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        found = {name: EntryPoint(name, target, registry.GROUP).load() for name, target in registry.BUILT_IN.items()}
        kept = {name for name, cls in found.items() if cls.capabilities.latents_only}
        self.entries = {name: Entry(name, cls if name in kept else fake(name)) for name, cls in found.items()}
        monkeypatch.setattr(registry, "_entry_points", lambda: self.entries)
        monkeypatch.setenv("PAGED_ATTN_TUNED", "none")
        self.device("cuda", 90)

    def device(self, word: str, architecture: int | None = None, name: str = "Test GPU") -> None:
        self.monkeypatch.setattr(requirements, "device_word", lambda device: word)
        self.monkeypatch.setattr(requirements, "architecture_of", lambda device: architecture)
        self.monkeypatch.setattr(requirements, "device_name", lambda device: name)

    def put(self, name: str, error: Exception | None = None, **capabilities: Any) -> type[AttentionBackend]:
        """Replace a backend, or add one."""
        cls = fake(name, replace(PLAIN, **capabilities), error)
        self.entries[name] = Entry(name, cls)
        return cls

    def lacks(self, *names: str) -> None:
        """The packages of these backends are missing."""
        for name in names:
            self.put(name, requirements=(Requirement(f"no_{name}", "2.0", f"pip install {name}"),))

    def take(self, name: str = "auto", spec: AttentionSpec | tuple[AttentionSpec, ...] = SPEC, **settings: Any) -> Selection:
        layers = spec if isinstance(spec, tuple) else (spec,)
        place = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "page_size": 16, "device": torch.device("cpu")} | settings
        return select(name, Requirements.of(layers, **place))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)
