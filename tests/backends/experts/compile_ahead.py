"""Compiles a layer of experts ahead for SM90 without a GPU, then asks for the kernels of many batches, and of other gates;
prints what was compiled ahead and what was not, what of it starts early, and what of that does not wait before it writes or ends. Run by
test_compile_ahead in a process of its own, because a process of the tests runs Triton's interpreter."""

from __future__ import annotations

import json
from concurrent.futures import wait
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends import machine
from paged_attn.backends.compiling import compile_ahead
from paged_attn.backends.compiling.compile_job import CompilingDriver
from paged_attn.backends.experts.triton import few, grouped, hopper
from paged_attn.backends.experts.triton.backend import TritonExpertsBackend
from tests.backends.experts.operands import operands
from tests.backends.gpus import named, only_compiled

OTHERS = (Gating("silu", gate_softcap=4.0, up_softcap=25.0), Gating("gelu", up_first=True), Gating("silu", True, True, 0.5, up_first=True))


def waits_first(ptx: str) -> bool:
    wait, launch = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
    others = [at for word in ("st.global", "atom.global", "ret;") if (at := ptx.find(word)) >= 0]
    return 0 <= wait < min(others) and (launch < 0 or wait < launch)


def main() -> None:
    driver.set_active(CompilingDriver(named().target))  # type: ignore[arg-type]
    machine.machine_of = hopper.machine_of = lambda device: named().machine  # type: ignore[assignment]
    later: list[str] = []
    starts: dict[str, bool] = {}

    def noted(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            later.append(src.name)

    def launch(kernel: Any, *given: Any, **constants: Any) -> None:
        compiled = only_compiled(kernel, *given, **constants)
        if compiled.metadata.launch_pdl:
            starts[kernel.__name__] = starts.get(kernel.__name__, True) and waits_first(compiled.asm["ptx"])

    knobs.compilation.listener = noted
    gating, sizes = Gating("silu", True, True, 7.0, 1.702), {"experts": 4, "top_k": 2, "hidden": 64, "width": 64, "dtype": torch.bfloat16}
    given = operands(3, gating, bias=True, **sizes)  # type: ignore[arg-type]
    TritonExpertsBackend().compile_ahead(*given)
    TritonExpertsBackend().compile_ahead(*given)  # nothing twice
    wait(compile_ahead._asked.values())
    ahead = sorted(kernel.__name__ for kernel, *_ in compile_ahead._asked)
    few.launch = grouped.launch = hopper.launch = launch  # type: ignore[assignment]
    for tokens in (1, 2, 7, 8, 9, 16, 23, 24, 31, 48, 49, 64, 100, 320, 321, 500, 512, 513, 1024, 3000):
        TritonExpertsBackend().forward(*operands(tokens, gating, bias=True, **sizes))  # type: ignore[arg-type]
    failed = [str(future.exception()) for future in compile_ahead._asked.values() if future.exception()]
    missing = list(later)
    hopper.FEWEST_PAIRS = 10**6  # and the general kernels for many pairs
    for other in OTHERS:  # what the interpreter takes, the compiler may not
        for tokens in (1, 16):
            TritonExpertsBackend().forward(*operands(tokens, other, **sizes))  # type: ignore[arg-type]
    hasty = [name for name, waits in starts.items() if not waits]
    print(json.dumps({"ahead": ahead, "failed": failed, "later": missing, "early": sorted(starts), "hasty": hasty}))


if __name__ == "__main__":
    main()
