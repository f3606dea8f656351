"""Compiles a layer of experts ahead for SM90 without a GPU, then asks for the kernels of many batches, and of other gates;
prints what was compiled when, what of it starts early, and what of that does not wait before it writes or ends. Run by
test_compile_ahead in a process of its own, because a process of the tests runs Triton's interpreter."""

from __future__ import annotations

import json
import time
from concurrent.futures import wait
from typing import Any

import torch
from triton.runtime import JITFunction, driver

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends import compile_ahead, machine
from paged_attn.backends.experts.triton import few, grouped, hopper
from paged_attn.backends.experts.triton.backend import TritonExpertsBackend
from paged_attn.backends.machine import Machine
from tests.backends.experts.operands import operands
from tests.backends.gpus import NoGPU

OTHERS = (Gating("silu", gate_softcap=4.0, up_softcap=25.0), Gating("gelu", up_first=True), Gating("silu", True, True, 0.5, up_first=True))


def waits_first(ptx: str) -> bool:
    wait, launch = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
    others = [at for word in ("st.global", "atom.global", "ret;") if (at := ptx.find(word)) >= 0]
    return 0 <= wait < min(others) and (launch < 0 or wait < launch)


def only_compiled(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    kernel.warmup(*map(compile_ahead._for_warmup, arguments), grid=grid, **constants)


def main() -> None:
    driver.set_active(NoGPU())  # type: ignore[arg-type]
    machine.machine_of = hopper.machine_of = lambda device: Machine(132, hopper=True, early=True)  # type: ignore[assignment]
    compiled: list[str] = []
    starts: dict[str, bool] = {}
    original = JITFunction._do_compile

    def counted(self: Any, *args: Any) -> Any:
        compiled.append(self.__name__)
        kernel = original(self, *args)
        if kernel is not None and kernel.metadata.launch_pdl:
            starts[self.__name__] = starts.get(self.__name__, True) and waits_first(kernel.asm["ptx"])
        return kernel

    JITFunction._do_compile = counted  # type: ignore[method-assign]
    gating, sizes = Gating("silu", True, True, 7.0, 1.702), {"experts": 4, "top_k": 2, "hidden": 64, "width": 64, "dtype": torch.bfloat16}
    given = operands(3, gating, bias=True, **sizes)  # type: ignore[arg-type]
    started = time.perf_counter()
    TritonExpertsBackend().compile_ahead(*given)
    asked = time.perf_counter() - started
    TritonExpertsBackend().compile_ahead(*given)  # nothing twice
    wait(compile_ahead._compiled.values())
    ready, ahead = time.perf_counter() - started, sorted(compiled)

    few.launch = grouped.launch = hopper.launch = only_compiled  # type: ignore[assignment]
    for tokens in (1, 2, 7, 8, 9, 16, 23, 24, 31, 48, 49, 64, 100, 320, 321, 500, 512, 513, 1024, 3000):
        TritonExpertsBackend().forward(*operands(tokens, gating, bias=True, **sizes))  # type: ignore[arg-type]
    later = compiled[len(ahead) :]
    hopper.FEWEST_PAIRS = 10**6  # and the general kernels for many pairs
    for other in OTHERS:  # what the interpreter takes, the compiler may not
        for tokens in (1, 16):
            TritonExpertsBackend().forward(*operands(tokens, other, **sizes))  # type: ignore[arg-type]
    hasty = [name for name, waits in starts.items() if not waits]
    print(json.dumps({"ahead": ahead, "later": later, "early": sorted(starts), "hasty": hasty, "asked": asked, "ready": ready}))


if __name__ == "__main__":
    main()
