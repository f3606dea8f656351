"""The order in which "auto" tries backends, as data: one row per kind of device. `unmet` removes those that do not fit.

The orders are those that SGLang documents (fa3 on Hopper, trtllm_mha on SM100, otherwise flashinfer, otherwise Triton; torch_native
on a CPU), followed by whatever else runs there. Two differences, both on Hopper: our Triton kernels come before flashinfer, which they beat
or equal on every shape of docs/kernels.md without compiling for minutes; and they come first for decoding, where they are as fast as fa3 or
faster, and take a third of its time if requests share a prefix, which they read once. A file of `paged-attn tune` takes precedence: see
`tuned`.

Models that keep latents have orders of their own. On Hopper ours is first for prompts, whose expanded keys and values its kernel handles at
1.07 to 1.15 of fa3's speed. fa3 is first for decoding: it takes 0.56 to 0.87 of our time with 128 heads, and about as long with 16.
flash_mla is up to 11 % faster still, or up to 39 % slower with 16 heads, and takes only pages of 64 (docs/design/latent_attention.md, an
H100). Other GPUs are not measured; backends that have not run on a GPU here are taken only by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

ORACLE = "reference"  # always last: it is written to be read, not to be fast


@dataclass(frozen=True)
class Order:
    """Names of backends, best first, per phase; `why` says where the order comes from, `notes` has remarks on some names."""

    extend: tuple[str, ...]
    decode: tuple[str, ...]
    why: str
    notes: dict[str, str] = field(default_factory=dict)
    fallback: str = ""  # `why` of the order appended to this one

    def only(self, known: Iterable[str]) -> Order:
        """This order without unknown names."""
        names = frozenset(known)
        return replace(self, extend=tuple(n for n in self.extend if n in names), decode=tuple(n for n in self.decode if n in names))

    def followed_by(self, later: Order) -> Order:
        """This order, then the names that only `later` has."""
        pairs = ((self.extend, later.extend), (self.decode, later.decode))
        extend, decode = ((*mine, *(name for name in theirs if name not in mine)) for mine, theirs in pairs)
        return Order(extend, decode, self.why, {**later.notes, **self.notes}, later.why)


@dataclass(frozen=True)
class Row:
    """The order on one kind of device; no architectures means all that no earlier row has. `latents`: for models that keep latents;
    `decode`, `latents_decode`: for decode steps, if different."""

    device: str
    architectures: frozenset[int]
    names: tuple[str, ...]
    latents: tuple[str, ...]
    why: str
    by_name_only: dict[str, str] = field(default_factory=dict)
    decode: tuple[str, ...] = ()
    latents_decode: tuple[str, ...] = ()


ROWS = (
    Row(
        "cuda", frozenset({90}), ("fa3", "triton", "flashinfer", "flash_attn", "torch_varlen", "flex", "torch_native"),
        ("triton", "fa3", "flashinfer", "torch_native"),
        "the order for Hopper",
        {"trtllm_mha": "on Hopper its kernel is XQA, for decode only, which no measurement of ours has put first"},
        decode=("triton", "fa3", "flashinfer", "flash_attn", "torch_varlen", "flex", "torch_native"),
        latents_decode=("fa3", "flash_mla", "triton", "flashinfer", "torch_native"),
    ),
    Row(
        "cuda", frozenset({100, 103}), ("trtllm_mha", "flashinfer", "triton", "flash_attn", "torch_varlen", "flex", "torch_native"),
        ("triton", "flashinfer", "torch_native"),
        "the order for Blackwell",
        {name: "this project has not run it on a GPU" for name in ("trtllm_mla", "cutlass_mla")},
    ),
    Row(
        "cuda", frozenset(), ("flashinfer", "triton", "flash_attn", "fa3", "torch_varlen", "flex", "torch_native"),
        ("triton", "flashinfer", "torch_native"),
        "the order for CUDA",
    ),
    Row("hip", frozenset(), ("triton", "flex", "torch_native"), ("triton", "torch_native"), "the order for ROCm"),
    Row("cpu", frozenset(), ("torch_native", "flex", "triton"), ("torch_native",), "the order for a CPU"),
)  # fmt: skip
NOT_LISTED = Row("", frozenset(), ("torch_native",), ("torch_native",), "the order for a device that is not listed")


def row_for(device: str, architecture: int | None) -> Row:
    """The first row for a device word ("cpu-amx" is a "cpu") and a CUDA architecture."""
    kind = device.partition("-")[0]
    rows = (row for row in ROWS if row.device == kind and (not row.architectures or architecture in row.architectures))
    return next(rows, NOT_LISTED)


def default_order(device: str, architecture: int | None, others: Iterable[str] = (), *, latents: bool = False) -> Order:
    """The row's names, then `others` (third parties' backends), then the oracle."""
    row = row_for(device, architecture)
    last = (*others, ORACLE)
    if not latents:
        return Order((*row.names, *last), (*(row.decode or row.names), *last), row.why)
    return Order((*row.latents, *last), (*(row.latents_decode or row.latents), *last), f"{row.why}, with latents")
