"""`paged-attn backends`: what each backend of attention and of experts can run, or with flags which would run a layer of attention."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from paged_attn.cli.problem import add_shape_options, layer_shape, shape_is_given
from paged_attn.cli.report import bold, width

if TYPE_CHECKING:
    from paged_attn.backends.selection.requirements import Requirements

HELP = "which backend can run what, and here"
FLAGS = ("window", "chunk", "softcap", "sinks", "deterministic", "on")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="the table of the documentation, without this machine's availability")
    add_shape_options(parser)
    group = parser.add_argument_group("more of the layer, and where (any of these, or of the above, asks for the order of backends)")
    group.add_argument("--window", type=int, metavar="W", help="a query sees the last W keys, itself included")
    group.add_argument("--chunk", type=int, metavar="C", help="a query sees its own chunk of C positions")
    group.add_argument("--softcap", type=float, metavar="S", help="scores are S * tanh(score / S)")
    group.add_argument("--sinks", action="store_true", default=None, help="a learned logit per head joins the softmax")
    group.add_argument("--deterministic", action="store_true", default=None, help="only what is batch-invariant")
    group.add_argument("--on", metavar="DEVICE", help="cpu, cuda, hip, or a GPU as sm90 or sm100 (default: this machine's GPU, or its CPU)")


def run(args: argparse.Namespace) -> int:
    from paged_attn.report.backend_matrix import matrix_markdown, matrix_text

    asked = shape_is_given(args) or any(getattr(args, name) is not None for name in FLAGS)
    if asked and args.markdown:
        raise ValueError("--markdown prints the table for all layers; drop it, or the flags for a layer")
    if asked:
        print(_order_text(args))
    else:
        print(matrix_markdown() if args.markdown else matrix_text(width()))
    return 0


def _order_text(args: argparse.Namespace) -> str:
    """What "auto" would take, and a line per backend in the order in which it looks at them."""
    from paged_attn.backends.selection.registry import backend_names
    from paged_attn.backends.selection.select import pick, why_picked
    from paged_attn.report.backend_matrix import text_table

    title, required = _wanted(args)
    order = required.order()
    names, _ = pick(required, order, {})
    taken = f"{','.join(names)} ({why_picked(order, names)})" if names else f"nothing: none fits in {order.why}"
    ranks: dict[str, list[str]] = {}
    for phase, ranked in (("prefill", order.extend), ("decode", order.decode)):
        for rank, name in enumerate(ranked, 1):
            ranks.setdefault(name, []).append(str(rank) if order.extend == order.decode else f"{rank} in {phase}")
    unranked = required.left_out([name for name in backend_names() if name not in ranks], order, None)
    rows = [
        (", ".join(dict.fromkeys(found_ranks)), name, _verdict(required, name, order.notes.get(name, "")))
        for name, found_ranks in ranks.items()
    ]
    rows += [("-", name, why) for name, why in unranked.items()]
    return f'{bold(title)}\n"auto" takes {taken}\n\n{text_table(("Rank", "Backend", "Fits"), rows, width())}'


def _verdict(required: Requirements, name: str, note: str) -> str:
    reasons = {"prefill": required.reasons(name, frozenset({"extend"})), "decode": required.reasons(name, frozenset({"decode"}))}
    if not any(reasons.values()):
        return "yes" + (f", {note}" if note else "")
    if not all(reasons.values()):
        return "; ".join(f"{phase}: {', '.join(why) or 'yes'}" for phase, why in reasons.items())
    return f"no: {'; '.join(required.reasons(name))}"


def _wanted(args: argparse.Namespace) -> tuple[str, Requirements]:
    """A line that says what is asked, and the same as data; a GPU that is not here has no measurements."""
    from dataclasses import replace

    import torch

    from paged_attn.backends.devices import default_device
    from paged_attn.backends.selection.requirements import Requirements

    here = default_device()
    kind, architecture = _device_of(args.on)
    device = here if kind is None else torch.device("cuda" if kind == "cuda" else "cpu")
    plain = layer_shape(args, device)
    spec = replace(plain.spec, sliding_window=args.window, chunk=args.chunk, softcap=args.softcap, has_sinks=bool(args.sinks))
    shape = replace(plain, spec=spec)
    if kind == "cuda" and architecture is None and here.type != "cuda":
        raise ValueError(f"--on {args.on} names no GPU, and this machine has none; say which, as sm90 or sm100")
    present = kind is None or (architecture is None and kind == "cuda" and here.type == "cuda")
    local = here if present else torch.device("cpu")
    required = Requirements.of([spec], shape.dtype, shape.dtype, shape.page_size, local, deterministic=bool(args.deterministic))
    if kind is not None and not present:
        problems = tuple(replace(problem, device=kind, architecture=architecture) for problem in required.problems)
        required = replace(required, problems=problems, device=kind, architecture=architecture, device_name="")
    where = required.device + (f" SM{required.architecture}" if required.architecture else "")
    return f"{shape}, on {where}" + (", deterministic" if required.deterministic else ""), required


def _device_of(text: str | None) -> tuple[str | None, int | None]:
    """A device word and a CUDA architecture, or None for this machine's."""
    if text is None:
        return None, None
    word = text.lower()
    if word.startswith("sm") and word[2:].isdigit():
        return "cuda", int(word[2:])
    if word in ("cpu", "cuda", "hip", "xpu", "npu"):
        return word, None
    raise ValueError(f"--on {text!r} is not a device; allowed are cpu, cuda, hip, xpu, npu, and GPUs as sm90 or sm100")
