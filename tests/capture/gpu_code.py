"""What Inductor writes for a GPU, without one: the source of a function's kernels for a made-up H200. Nothing is compiled or run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.source import ConstantSource
from torch._inductor import scheduler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from triton.runtime import driver

from paged_attn.backends.compiling.compile_job import CompilingDriver
from tests.backends.gpus import GPUS

SHARED = {"shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472}
FACTS = {"multi_processor_count": 132, "major": 9, "warp_size": 32, "regs_per_multiprocessor": 65536}


@contextlib.contextmanager
def made_up_gpu() -> Iterator[None]:
    """Inside, torch and Triton believe that an H200 is device 0."""
    device = SimpleNamespace(name="NVIDIA H200", minor=0, total_memory=1 << 37, L2_cache_size=50 << 20, gcnArchName="", **SHARED, **FACTS)
    properties = DeviceProperties(type="cuda", index=0, cc=90, max_threads_per_multi_processor=2048, **FACTS)
    answers = {
        "get_device_properties": device,
        "current_device": 0,
        "device_count": 1,
        "is_available": True,
        "get_device_capability": (9, 0),
        "_lazy_init": None,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *given, answer=answer: answer))
        stack.enter_context(patch.object(DeviceProperties, "create", lambda *given: properties))
        stack.enter_context(patch.object(scheduler, "has_triton", lambda: True))  # the real one remembers its first answer
        stack.enter_context(patch.object(AsyncCompile, "triton", lambda *given, **options: None))
        before = driver._active
        driver.set_active(CompilingDriver(GPUS["h100"].target))
        try:
            yield
        finally:
            driver._active = before


def kernels_for_gpu(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> str:
    """Inductor's Python and Triton source for `function` of bfloat16 tensors of these shapes, whose first sizes are symbols."""
    environment = ShapeEnv()
    given = []
    mode = FakeTensorMode(shape_env=environment)
    for index, shape in enumerate(shapes):
        sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK, *[DimDynamic.STATIC] * (len(shape) - 1)])
        real = torch.empty(shape, dtype=torch.bfloat16)
        given.append(mode.from_tensor(real, symbolic_context=sizes, source=ConstantSource(f"input{index}")))
    with mode:
        on_gpu = [torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="cuda") for fake in given]
        traced = make_fx(function, decomposition_table=select_decomp_table())(*given)
    with made_up_gpu(), V.set_fake_mode(mode):
        lowered = GraphLowering(traced, shape_env=environment)
        with V.set_graph_handler(lowered), V.set_debug_handler(DebugContext()):
            lowered.run(*on_gpu)
            source: Any = lowered.codegen()[0]
    return str(getattr(source, "value", source))
