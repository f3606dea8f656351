"""Which backends exist: the entry-point group `paged_attn.backends`, ours and third parties', loaded when asked for."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.backends.base import AttentionBackend

GROUP = "paged_attn.backends"
BUILT_IN = {
    "torch_native": "paged_attn.backends.torch_native:TorchNativeBackend",
    "reference": "paged_attn.backends.reference:ReferenceBackend",
}
# Best first for "auto"; names that are not listed come after these, the oracle last of all.
PREFERENCE = ("torch_native", "reference")


@cache
def _entry_points() -> dict[str, EntryPoint]:
    found = {name: EntryPoint(name, target, GROUP) for name, target in BUILT_IN.items()}
    for entry in entry_points(group=GROUP):
        if entry.name in found and entry.value != found[entry.name].value:
            raise UnsupportedError(
                f"two packages register the attention backend {entry.name!r}: {found[entry.name].value} and {entry.value}; uninstall one"
            )
        found[entry.name] = entry
    return found


def backend_names() -> list[str]:
    """All registered names, in the order in which "auto" prefers them."""
    names = list(_entry_points())
    others = [name for name in names if name not in PREFERENCE]
    return [*(n for n in PREFERENCE[:-1] if n in names), *sorted(others), PREFERENCE[-1]]


def backend_class(name: str) -> type[AttentionBackend]:
    """The class behind a name; importing it imports no optional package.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in _entry_points():
        raise ValueError(f"unknown attention backend {name!r}; known are 'auto' and {', '.join(map(repr, backend_names()))}")
    loaded: type[AttentionBackend] = _entry_points()[name].load()
    return loaded
