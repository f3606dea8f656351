"""Which backends exist: ours, those of the entry-point group `paged_attn.backends`, loaded on request, and those that a program
registers."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.selection.ranking import ORACLE

GROUP = "paged_attn.backends"
BUILT_IN = {
    "fa3": "paged_attn.backends.attention.fa3:FA3Backend",
    "flashinfer": "paged_attn.backends.attention.flashinfer.backend:FlashInferBackend",
    "trtllm_mha": "paged_attn.backends.attention.flashinfer.trtllm:TrtllmMhaBackend",
    "flash_mla": "paged_attn.backends.attention.decode_only.flash_mla:FlashMlaBackend",
    "cutlass_mla": "paged_attn.backends.attention.decode_only.cutlass_mla:CutlassMlaBackend",
    "trtllm_mla": "paged_attn.backends.attention.flashinfer.trtllm:TrtllmMlaBackend",
    "triton": "paged_attn.backends.attention.triton.backend:TritonBackend",
    "flash_attn": "paged_attn.backends.attention.flash_attn:FlashAttnBackend",
    "torch_varlen": "paged_attn.backends.attention.torch_varlen:TorchVarlenBackend",
    "flex": "paged_attn.backends.attention.flex.backend:FlexBackend",
    "torch_native": "paged_attn.backends.attention.torch_native:TorchNativeBackend",
    "reference": "paged_attn.backends.attention.reference:ReferenceBackend",
}
# Names that SGLang lists and this project has no kernel call for, and what to use instead.
UNSUPPORTED = {
    "fa4": "fa3 on Hopper, flashinfer or triton on Blackwell",
    "dual_chunk_flash_attn": "triton, which runs the same formula in three launches",
    "aiter": "a CUDA GPU or a CPU; nothing here has run on ROCm",
    "wave": "a CUDA GPU or a CPU; nothing here has run on ROCm",
    "ascend": "a CUDA GPU or a CPU; nothing here has run on an NPU",
    "intel_amx": "torch_native",
    "intel_xpu": "a CUDA GPU or a CPU; nothing here has run on an Intel GPU",
}
_of_this_process: dict[str, type[AttentionBackend]] = {}


def register_backend(name: str, cls: type[AttentionBackend]) -> None:
    """Registers a backend in this process, for `backend=name` and, after ours, for "auto".

    A package declares an entry point of the group `paged_attn.backends` instead (`name = "module:Class"`), which every process finds.
    A second class under a name replaces the first, as when a notebook cell runs again; running engines keep theirs.

    Raises:
        TypeError: not a class with all of `AttentionBackend`'s methods, `name` and `capabilities`.
        ValueError: the class has another name; the name is empty or has another meaning; a package or this project uses it.
    """
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        raise TypeError(f"{cls!r} cannot be registered as {name!r}; allowed is a class derived from AttentionBackend")
    missing = sorted(getattr(cls, "__abstractmethods__", ())) + [each for each in ("name", "capabilities") if not hasattr(cls, each)]
    if missing:
        raise TypeError(f"{cls.__qualname__} cannot be registered as {name!r}; it lacks {', '.join(missing)}")
    if cls.name != name:
        raise ValueError(f"{cls.__qualname__} cannot be registered as {name!r}; its own name, which reports show, is {cls.name!r}")
    if name in ("", "auto") or "," in name or name != name.strip():
        raise ValueError(f"an attention backend cannot be called {name!r}; 'auto', a comma, and spaces around a name mean something else")
    if name in _entry_points():
        raise ValueError(f"there is an attention backend {name!r}: {_entry_points()[name].value}; choose another name")
    _of_this_process[name] = cls


@cache
def _entry_points() -> dict[str, EntryPoint]:
    found = {name: EntryPoint(name, target, GROUP) for name, target in BUILT_IN.items()}
    for entry in entry_points(group=GROUP):
        if entry.name in found and entry.value != found[entry.name].value:
            raise UnsupportedError(
                f"two packages register the attention backend {entry.name!r}: {found[entry.name].value} and {entry.value}; uninstall one"
            )
        if entry.name == "auto" or "," in entry.name:
            raise UnsupportedError(
                f"{entry.value} registers an attention backend as {entry.name!r}; 'auto' and names with a comma (two backends, one for "
                "prefill and one for decode) are taken: uninstall that package"
            )
        found[entry.name] = entry
    return found


def backend_names() -> list[str]:
    """All registered names: ours, third parties', the oracle."""
    ours = [name for name in BUILT_IN if name != ORACLE]
    return [*ours, *third_party_names(), ORACLE]


def third_party_names() -> list[str]:
    """Names registered by other packages and by this program."""
    return sorted({*_entry_points(), *_of_this_process} - BUILT_IN.keys())


def loadable_classes() -> dict[str, type[AttentionBackend]]:
    """The classes of all names whose modules can be imported."""
    found = {}
    for name in backend_names():
        with suppress(ImportError):
            found[name] = backend_class(name)
    return found


def backend_class(name: str) -> type[AttentionBackend]:
    """The class of a name; imports no optional package.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
        UnsupportedError: a name of SGLang's without a registered backend; the message says what to use.
        ImportError: its module cannot be imported.
    """
    if name in _of_this_process:
        return _of_this_process[name]
    if name not in _entry_points():
        if name in UNSUPPORTED:
            raise UnsupportedError(f"attention backend {name!r}: this project has no kernel call for it yet; use {UNSUPPORTED[name]}")
        raise ValueError(
            f"unknown attention backend {name!r}; known are 'auto', {', '.join(map(repr, backend_names()))}, and two of them as "
            "'fa3,flashinfer' (prefill, decode)"
        )
    loaded: type[AttentionBackend] = _entry_points()[name].load()
    return loaded
