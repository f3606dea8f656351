"""Gives Inductor's Triton kernels block sizes that suit steps of many rows.

Inductor derives block sizes from the sizes that it traced, here a handful of tokens. An element-wise kernel then gets blocks of 256
elements and one warp, and spends most of its time starting blocks on a prompt's rows: RoPE of 2,048 rows took 51 us, and 17 us with
blocks of 1,024 (H200, docs/design/inductor.md). And a few long rows are reduced in parts by two kernels, to fill a GPU that many rows fill
by themselves. Only that is changed here; what a kernel computes, and for which sizes it is valid, stays as Inductor decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import sympy
from torch.utils._sympy.symbol import SymT, symbol_is_type

from paged_attn.capture.inductor.cache_mark import marked

ROWS = 2047  # Inductor rounds up to a power of 2; this is not one itself, so no size seems divisible that is not


@contextlib.contextmanager
def blocks_for_many_rows() -> Iterator[None]:
    """Inside, Inductor chooses blocks, and whether it splits reductions, as if each smaller traced size were `ROWS`."""
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.ir import Reduction

    write, split = TritonKernel.codegen_kernel, Reduction.num_splits

    def written(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        with _many_rows():
            return write(kernel, *args, **kwargs)

    def splits(*args: Any, **kwargs: Any) -> Any:
        with _many_rows():
            return split(*args, **kwargs)

    with (
        marked(f"blocks and splits for {ROWS} rows"),
        patch.object(TritonKernel, "codegen_kernel", written),
        patch.object(Reduction, "num_splits", staticmethod(splits)),
    ):
        yield


@contextlib.contextmanager
def _many_rows() -> Iterator[None]:
    """Patches what Inductor asks for a size on which it may not guard: `symbolic_hint` in torch 2.11, `optimization_hint` later."""
    from torch._inductor.sizevars import SizeVarAllocator

    with contextlib.ExitStack() as stack:
        for name in ("symbolic_hint", "optimization_hint"):
            if (method := getattr(SizeVarAllocator, name, None)) is not None:
                stack.enter_context(patch.object(SizeVarAllocator, name, _with_many_rows(method)))
        yield


def _with_many_rows(method: Callable[..., Any]) -> Callable[..., Any]:
    def hint(sizevars: Any, *args: Any, **kwargs: Any) -> Any:
        environment, name = sizevars.shape_env, "backed_var_to_val"
        many = {symbol: sympy.Integer(ROWS) if _is_few(symbol, size) else size for symbol, size in getattr(environment, name).items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(environment, name, many))
            stack.enter_context(patch.object(sizevars, name, many))
            if hasattr(sizevars, "_optimization_hint_cache"):  # torch 2.15 caches answers
                stack.enter_context(patch.object(sizevars, "_optimization_hint_cache", sizevars._optimization_hint_uncached))
            return method(sizevars, *args, **kwargs)

    return hint


def _is_few(symbol: sympy.Symbol, size: Any) -> bool:
    return symbol_is_type(symbol, SymT.SIZE) and isinstance(size, sympy.Integer) and size < ROWS
