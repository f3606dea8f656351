"""`paged-attn bench`: measure this engine, and peers beside it on the same prompts; each runs in a process of its own."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_attn.bench.shapes import SHAPE_NAMES, SHAPES
from paged_attn.bench.systems.job import Sampling
from paged_attn.bench.systems.systems import OURS, PEERS, SYSTEMS, draws_weights, peers
from paged_attn.bench.workloads import GROUPS, SCALES, Workload, chosen
from paged_attn.cli.options import DTYPES, add_engine, engine_config, set_verbosity

if TYPE_CHECKING:
    from paged_attn.bench.launch import Outcome
    from paged_attn.bench.session import Session

HELP = "measure this engine and its peers side by side"


def add_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    which = model.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="DIR_OR_HUB_ID", help="a checkpoint")
    which.add_argument("--shape", choices=SHAPE_NAMES, help="random weights of this shape (default: llama-3.1-8b on a GPU, tiny on a CPU)")
    model.add_argument("--layers", type=int, metavar="N", help="the shape's first N layers (default: all)")
    model.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: the checkpoint's; a shape's is bfloat16, on a CPU float32")
    model.add_argument("--device", help="cuda, cuda:N or cpu (default: the GPU if there is one)")
    model.add_argument(
        "--save-weights", action=argparse.BooleanOptionalAction, default=None,
        help="write random weights to disk first, so that vLLM has the same ones (default: beside vLLM where a shape has experts, since "
        "its own random numbers send all tokens to the same few)",
    )  # fmt: skip
    work = parser.add_argument_group("workloads")
    words = "; ".join(f"{name}: {about}" for name, about in GROUPS.items())
    work.add_argument("--workload", default=",".join(GROUPS), metavar="A,B", help=f"{words} (default: all)")
    work.add_argument("--scale", choices=SCALES, help="how much of it (default: full on a GPU, small on a CPU and for the tiny shape)")
    work.add_argument(
        "--smoke", action="store_true", help="the tiny shape on the CPU, once, in some seconds: whether it works; its figures mean nothing"
    )
    work.add_argument("--requests", metavar="N[,N]", help="requests at once, in place of the scale's; several numbers: a workload of each")
    work.add_argument("--input-len", metavar="N|A-B", help="tokens of a prompt, its shared ones apart")
    work.add_argument("--output-len", type=int, metavar="N", help="new tokens of each request")
    work.add_argument("--shared-len", type=int, metavar="N", help="tokens that the prompts of the prefix workload share")
    work.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    work.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    work.add_argument("--top-p", type=float, default=1.0, metavar="P", help="with a temperature; 1 turns it off")
    work.add_argument("--top-k", type=int, default=0, metavar="K", help="with a temperature; 0 turns it off")
    how = parser.add_argument_group("measurement")
    words = "; ".join(f"{name}: {SYSTEMS[name].about}" for name in PEERS)
    how.add_argument("--compare", default="", metavar="A,B", help=f"peers, or all. {words}")
    how.add_argument("--repeat", type=int, default=3, metavar="N", help="timed repetitions; the median counts (default: %(default)s)")
    how.add_argument("--max-seconds", type=float, default=60.0, metavar="S", help="of all repetitions of a workload (default: %(default)g)")
    how.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="after which a system is ended (default: %(default)g)")
    how.add_argument("--option", action="append", default=[], metavar="SYSTEM.NAME=VALUE", help="a peer's own setting; may be repeated")
    how.add_argument("--json", metavar="FILE", help="write all figures as JSON")
    how.add_argument("--chart", metavar="FILE.svg", help="write a chart of the speeds")
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Tables to stdout, the course of things to stderr.

    Returns 1 if this engine did not run every workload, or if peers were asked for and none ran.
    """
    if args.smoke:
        args.device, args.scale, args.repeat = args.device or "cpu", args.scale or "smoke", 1
        args.shape = args.shape or (None if args.model else "tiny")
    session = _session(args)
    set_verbosity(args.verbose)
    return _report(args, session, session.run())


def _session(args: argparse.Namespace) -> Session:
    """The flags, checked. Raises ValueError for those that cannot be meant."""
    names = peers(args.compare)
    options = {OURS: asdict(engine_config(args)), **_peer_options(args.option, names)}
    for flag, low in (("repeat", 1), ("max_seconds", 0), ("timeout", 1)):
        if not getattr(args, flag) >= low:
            raise ValueError(f"--{flag.replace('_', '-')} is {getattr(args, flag):g}; allowed are values of at least {low}")
    for target in (args.json, args.chart):
        if target is not None and not Path(target).absolute().parent.is_dir():
            raise ValueError(f"{target!r} cannot be written: there is no folder {str(Path(target).absolute().parent)!r}; make it first")
    if args.save_weights and args.model is not None:
        raise ValueError("--save-weights is for random weights; a checkpoint has its own on disk already")
    if args.layers is not None and args.model is not None:
        raise ValueError("--layers cuts a shape; a checkpoint has the layers that it has")
    from paged_attn.backends.devices import checked_device

    device = str(checked_device(args.device))
    shape = args.shape or ("llama-3.1-8b" if device.startswith("cuda") else "tiny")
    save_weights = args.save_weights
    if save_weights is None:
        has_experts = "num_experts_per_tok" in SHAPES[shape]
        save_weights = args.model is None and has_experts and any(draws_weights(name, device) for name in names)
    workloads = _workloads(args, "full" if device.startswith("cuda") and shape != "tiny" else "small")

    from paged_attn.bench.session import Session

    return Session(
        args.model, shape, args.layers, args.dtype, device, save_weights, workloads, names, args.seed, args.repeat, args.max_seconds,
        args.timeout, options, _sampling(args), args.verbose,
    )  # fmt: skip


def _sampling(args: argparse.Namespace) -> Sampling:
    """Raises ValueError for values out of range, and for a filter where nothing is drawn."""
    from paged_attn.engine.sampling_params import SamplingParams

    found = Sampling(args.temperature, args.top_p, args.top_k)
    SamplingParams(**vars(found))
    if found.is_greedy and (filters := [name for name in found.given if name != "temperature"]):
        raise ValueError(f"--{filters[0].replace('_', '-')} changes nothing at temperature 0; give --temperature as well, or leave it out")
    return found


def _report(args: argparse.Namespace, session: Session, outcomes: list[Outcome]) -> int:
    from paged_attn.bench.machine import machine
    from paged_attn.bench.results.chart import draw
    from paged_attn.bench.results.compare import record
    from paged_attn.bench.results.tables import lines

    found = record(outcomes, session.workloads, session.same_tokens, session.facts(machine(session.device)))
    print("\n".join(lines(found)), flush=True)  # first: a disk may be full
    if args.json is not None:
        _write(args.json, json.dumps(found, indent=1) + "\n")
    ours, *others = outcomes
    if args.chart is not None and any(outcome.timed for outcome in outcomes):
        _write(args.chart, draw(found))
    complete = ours.failed is None and not ours.broken
    return 0 if complete and (not others or any(outcome.timed for outcome in others)) else 1


def _write(target: str, text: str) -> None:
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise OSError(f"{target!r} could not be written: {error}") from error


def _workloads(args: argparse.Namespace, usual_scale: str) -> list[Workload]:
    for flag in ("output_len", "shared_len"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag.replace('_', '-')} is {value}; allowed are values of at least 1")
    return chosen(
        args.scale or usual_scale,
        [group.strip() for group in args.workload.split(",") if group.strip()],
        requests=None if args.requests is None else [_whole("--requests", part) for part in args.requests.split(",")],
        input_len=None if args.input_len is None else _range(args.input_len),
        output_len=args.output_len,
        shared_len=args.shared_len,
    )


def _whole(flag: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{flag}: {text!r} is not a whole number of at least 1")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    found = _whole("--input-len", low), _whole("--input-len", high or low)
    if found[0] > found[1]:
        raise ValueError(f"--input-len {text}: the first number is larger than the second; write {found[1]}-{found[0]}")
    return found


def _peer_options(given: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    """--option's, a dict for each peer; values are JSON, or plain text."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in given:
        name, _, value = text.partition("=")
        system, _, key = name.partition(".")
        if system not in names or not key or not value:
            raise ValueError(
                f"--option {text!r}: allowed is SYSTEM.NAME=VALUE with a peer that --compare asks for ({', '.join(names) or 'none now'}); "
                "this engine's settings have flags of their own"
            )
        try:
            found[system][key] = json.loads(value)
        except json.JSONDecodeError:
            found[system][key] = value
    return found
