"""Times our prefill kernels side by side, by head dims and tilings: for Hopper as `tiling.py` launches it, with other numbers, and the
general one, beside other backends. Each is checked before it is timed, as in kernels.py.

python benchmarks/prefill.py                                    # 192/128 and 256/256; under a minute
python benchmarks/prefill.py --tilings                          # the tilings of TILINGS besides
python benchmarks/prefill.py --tilings block_n=64,stages=3,query_tiles=2 turns=0 --dims 128/128 --backends fa3,flashinfer
python benchmarks/prefill.py --smoke                            # tiny prompts, on a CPU by torch_native

A tiling is what `Tiling` has other than `tiling.py` chose. One that asks for more shared memory or registers than there are says so.
FlashInfer compiles its kernels on first use, which takes minutes, and so is not in the default of --backends.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from kernels import add_ratios, ceilings, line_of, made_backends, measure

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.triton.backend import TritonBackend
from paged_attn.backends.devices import device_name
from paged_attn.backends.timing.problem import TimedProblem

PROMPTS = ((1, 8192), (4, 2048), (1, 16_384))
HEADS = {"192/128": (16, 16), "256/256": (16, 8)}  # query and KV heads; (32, 8) of other dims
TILINGS = {
    "192/128": ("block_n=128,stages=2,query_tiles=1", "block_n=64,stages=3,query_tiles=2", "block_n=64,stages=4,query_tiles=1", "turns=0"),
    "256/256": ("producer_registers=56", "producer_registers=88", "turns=0"),
}  # fmt: skip


class WithTiling(TritonBackend):
    """The Triton backend with other launch numbers than those of `tiling.py`; with {"hopper": 0} the general kernel runs."""

    def __init__(self, numbers: dict[str, int]) -> None:
        super().__init__()
        self.numbers = numbers

    def plan(self, batch: Batch, pool: KVPool) -> Any:
        from paged_attn.backends.attention.triton import plan

        chosen, machine_of = plan.tiling, plan.machine_of

        def machine(device: torch.device) -> Any:
            found = machine_of(device)
            return found if self.numbers.get("hopper", 1) else dataclasses.replace(found, hopper=False)

        def tiling(*args: Any) -> Any:
            found = chosen(*args)
            return dataclasses.replace(found, **self.numbers) if found.hopper else found

        with patch.object(plan, "tiling", tiling), patch.object(plan, "machine_of", machine):
            return super().plan(batch, pool)


def numbers_of(text: str) -> dict[str, int]:
    """{"block_n": 64} of "block_n=64"."""
    from paged_attn.backends.attention.triton.tiling import Tiling

    names = {field.name for field in dataclasses.fields(Tiling)}
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if wrong := [name for name, _, number in pairs if name not in names or not number.isdigit()]:
        raise SystemExit(f"--tilings {text}: {', '.join(wrong)}; give name=number of {', '.join(sorted(names))}")
    return {name: int(number) for name, _, number in pairs}


def backends_for(dims: str, others: dict[str, AttentionBackend], tilings: Sequence[str] | None) -> Iterator[tuple[str, AttentionBackend]]:
    """By the name that its lines have."""
    yield "hopper", TritonBackend()
    for text in () if tilings is None else tilings or TILINGS.get(dims, ()):
        yield text, WithTiling(numbers_of(text))
    yield "general", WithTiling({"hopper": 0})
    yield from others.items()


def tiling_of(problem: TimedProblem, device: torch.device) -> str:
    """What `tiling.py` chose: the kernel for Hopper or not, and its numbers."""
    from paged_attn.backends.attention.triton.tiling import tiling
    from paged_attn.backends.machine import machine_of

    lengths = [cached + new for cached, new in problem.requests]
    longest = max(new for _, new in problem.requests)
    found = tiling("more", problem.spec, problem.dtype, longest, max(lengths), sum(lengths), machine_of(device))
    if not found.hopper:
        return "not the kernel for Hopper"
    names = ("block_n", "stages", "query_tiles", "producer_registers", "waves")
    return ",".join(f"{name}={getattr(found, name)}" for name in names)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default=",".join(HEADS), help="of keys and of values, comma-separated")
    parser.add_argument("--tilings", nargs="*", help="time these besides, or without any here those of TILINGS")
    parser.add_argument("--backends", default="fa3", help="time these besides, comma-separated; '' for none")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--min-ms", type=float, default=40, help="of samples of each kernel")
    parser.add_argument("--smoke", action="store_true", help="tiny prompts, to see that it works")
    parser.add_argument("--out", type=Path, help="a JSON file for all rows")
    args = parser.parse_args(argv)
    args.device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
    args.runs, args.with_write, args.plan_in_graph = 1, False, False
    if args.device.type != "cuda" and not args.smoke:
        parser.error("there is no GPU; --smoke runs tiny prompts on a CPU")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    cuda = args.device.type == "cuda"
    others, missing = made_backends([name for name in args.backends.split(",") if name] if cuda else ["torch_native"], False)
    ceiling = ceilings(args.device, args.smoke)
    print(f"{device_name(args.device)}; a square product runs at {ceiling['gemm']:,.0f} TFLOP/s", flush=True)
    for name, reason in missing.items():
        print(f"{name}: {reason}", flush=True)
    rows = []
    for dims in args.dims.split(","):
        qk, v = map(int, dims.split("/"))
        heads = HEADS.get(dims, (32, 8))
        backends = dict(backends_for(dims, others, args.tilings)) if cuda else others
        for count, length in PROMPTS if cuda else ((1, 20), (2, 7)):
            spec = AttentionSpec(*heads, qk, v, qk**-0.5)
            problem = TimedProblem("prefill", ((0, length),) * count, spec, args.page_size, torch.bfloat16)
            shape = f"{dims} {count} x {length:,}"
            found = measure(shape, "prefill", problem, backends, args)
            add_ratios(found, ceiling)
            rows += found
            if cuda:
                print(f"{shape}: {heads[0]} heads over {heads[1]}; hopper is {tiling_of(problem, args.device)}")
            print("\n".join(map(line_of, found)), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"gpu": device_name(args.device), "ceilings": ceiling, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
