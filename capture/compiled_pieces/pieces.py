"""Compiles the pieces of a split graph, equal ones once; the split ops between them stay as they are."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from paged_attn.capture.compiled_pieces.artifact_key import artifact_key
from paged_attn.capture.compiled_pieces.artifacts import Artifact, ArtifactCache, Compiled, tagged
from paged_attn.capture.compiled_pieces.piece_finder import Piece, computes, pieces_of
from paged_attn.capture.inductor.launch_sizes import blocks_for_many_rows
from paged_attn.capture.inductor.launchers import building_launchers
from paged_attn.capture.inductor.pdl import waiting_first
from paged_attn.capture.inductor.reductions import rows_in_any_order
from paged_attn.capture.inductor.reshapes import rows_set_aside
from paged_attn.capture.inductor.triton_cache import pin_triton_cache
from paged_attn.capture.split.fingerprint import portable
from paged_attn.capture.split.split_graph import SplitGraph

logger = logging.getLogger("paged_attn")

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Artifact]


@dataclass(frozen=True)
class CachedPiece:
    """A piece whose compiled form is on disk, by its name in the split graph and what the form was compiled for.

    Attributes:
        arguments: names of the split graph's nodes that it is called with. Splitting also passes sizes that it finds only in fake tensors,
            which a graph from disk does not have.
        single: whether the piece returns a single value.
    """

    name: str
    fingerprint: str
    guards: str
    arguments: tuple[str, ...]
    single: bool


@dataclass(frozen=True)
class PieceReport:
    """How many pieces compute something, how many of them are distinct, how many of those came from disk, and the seconds in total.

    kept: what `load_pieces` needs in another process; None if any piece must be compiled again.
    """

    pieces: int
    distinct: int
    loaded: int
    seconds: float
    kept: tuple[CachedPiece, ...] | None = None

    def describe(self) -> str:
        """`4 distinct of 33 in 12.3 s, 3 of them loaded from disk`."""
        return f"{self.distinct} distinct of {self.pieces} in {self.seconds:.1f} s, {self.loaded} of them loaded from disk"


def inductor(piece: fx.GraphModule, inputs: Sequence[Any]) -> Artifact:
    """Inductor with the symbols of Dynamo's tracing context.

    Kernels choose among their configurations when they first run. By default `standalone_compile` would time them at compile time, on the
    few tokens of the trace. There all are equally fast, and the one chosen can be 1.4 times slower on thousands of tokens.
    """
    options = {"config_patches": {"triton.autotune_at_compile_time": False}}
    with waiting_first(), blocks_for_many_rows(), rows_in_any_order(), rows_set_aside(), building_launchers():
        return torch._inductor.standalone_compile(piece, list(inputs), dynamic_shapes="from_tracing_context", options=options)


def compile_pieces(
    split: SplitGraph, traced: Sequence[Any], cache: ArtifactCache | None = None, compiler: Compiler = inductor
) -> PieceReport:
    """Compile every piece in place, with T as the symbol that Dynamo gave it. Structurally equal pieces become one callable.

    A compiled piece is a plain attribute of `split.gm`, not a submodule: calling a module costs as much as launching a small kernel.
    Must run inside the Dynamo backend call, whose tracing context knows which sizes are symbolic.

    Args:
        traced: Dynamo's fake tensors and symbolic sizes for the graph's inputs, in order.
        cache: where compiled pieces are stored for other processes, or None.
    """
    started = time.perf_counter()
    pin_triton_cache()
    pieces = pieces_of(split, traced)
    distinct = len({piece.fingerprint or piece.name for piece in pieces})
    logger.info("compiling %d distinct pieces of %d; the first takes longest", distinct, len(pieces))
    shared: dict[str, list[Compiled]] = {}
    made = loaded = 0
    kept: list[CachedPiece] = []
    calls = _calls(split)
    for piece in pieces:
        known = shared.setdefault(piece.fingerprint or piece.name, [])
        fitting = next((each for each in known if piece.sizes.holds(each.guards)), None)
        if fitting is None:
            fitting, from_disk = _make(piece, cache, compiler)
            known.append(fitting)
            made, loaded = made + 1, loaded + from_disk
        _put(split, piece.name, fitting, piece.single)
        if cache is not None and piece.fingerprint is not None and fitting.guards is not None and portable(piece.gm):
            arguments = tuple(str(argument) for argument in calls[piece.name].args)
            kept.append(CachedPiece(piece.name, piece.fingerprint, fitting.guards, arguments, piece.single))
    all_kept = tuple(kept) if len(kept) == len(pieces) else None
    report = PieceReport(len(pieces), made, loaded, time.perf_counter() - started, all_kept)
    logger.info("compiled pieces: %s", report.describe())
    return report


def load_pieces(split: SplitGraph, kept: Sequence[CachedPiece], cache: ArtifactCache) -> PieceReport | None:
    """Put the compiled form of every piece in its place without examining what the pieces compute. Returns None, and changes nothing, if
    one is missing or is called with something that the graph lacks.

    Args:
        kept: what `compile_pieces` reported for the same split graph in another process.
    """
    started = time.perf_counter()
    pin_triton_cache()
    computing = [name for name in split.pieces if computes(getattr(split.gm, name))]
    if computing != [piece.name for piece in kept]:
        return None
    found: dict[tuple[str, str], Compiled] = {}
    for piece in kept:
        piece_key = (piece.fingerprint, piece.guards)
        if piece_key not in found:
            key = artifact_key(piece.fingerprint)
            stored = None if key is None else cache.load(key)
            if stored is None or stored.guards != piece.guards:
                return None
            found[piece_key] = stored
    nodes, calls = {node.name: node for node in split.gm.graph.nodes}, _calls(split)
    if any(name not in nodes for piece in kept for name in piece.arguments):
        return None
    for piece in kept:
        calls[piece.name].args = tuple(nodes[name] for name in piece.arguments)
        _put(split, piece.name, found[piece.fingerprint, piece.guards], piece.single)
    split.gm.recompile()
    report = PieceReport(len(kept), len(found), len(found), time.perf_counter() - started, tuple(kept))
    logger.info("loaded pieces: %s", report.describe())
    return report


def _calls(split: SplitGraph) -> dict[str, fx.Node]:
    """The call of each piece, by the piece's name; each has exactly one."""
    return {str(node.target): node for node in split.gm.graph.nodes if node.op == "call_module"}


def _put(split: SplitGraph, name: str, compiled: Compiled, single: bool) -> None:
    run = compiled.run
    delattr(split.gm, name)
    setattr(split.gm, name, (lambda *args: run(*args)[0]) if single else run)


def _make(piece: Piece, cache: ArtifactCache | None, compiler: Compiler) -> tuple[Compiled, bool]:
    """The compiled piece, and whether it came from disk."""
    started = time.perf_counter()
    key = None
    if cache is not None and piece.fingerprint is not None and portable(piece.gm):
        key = artifact_key(piece.fingerprint)
    if cache is None or key is None:
        return Compiled(*_compile(piece, compiler, started)), False
    stored = cache.load(key)
    if stored is not None and piece.sizes.holds(stored.guards):
        logger.info("loaded %s from disk in %.1f s", piece.name, time.perf_counter() - started)
        return stored, True
    with tagged(f"{key} {piece.sizes.guards()} {piece.sizes.seen()}"):
        artifact, guards = _compile(piece, compiler, started)
    if guards is not None:
        cache.save(key, artifact, guards)
    return Compiled(artifact, guards), False


def _compile(piece: Piece, compiler: Compiler, started: float) -> tuple[Artifact, str | None]:
    with torch.no_grad(), enable_python_dispatcher():
        artifact = compiler(piece.gm, piece.inputs)
    logger.info("compiled %s in %.1f s", piece.name, time.perf_counter() - started)
    return artifact, piece.sizes.guards() if piece.sizes.known else None
