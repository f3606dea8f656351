"""Launches the kernels of prompts, and of all requests with more than one new token."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_attn.attn_ops.scans.gated_delta import EPS
from paged_attn.attn_ops.scans.state_rows import Extends
from paged_attn.backends.compile_ahead import launch
from paged_attn.backends.scans.triton.prompts_kernel import scan_channels, scan_chunks, solve_chunks

MOST = 256  # of a state's dimension that a program holds whole
CHUNK = 64  # tokens
SOLVED_CHUNK = 32  # of the delta rule, whose chunks are solved token after token; and where keys are longer than LONG
WIDE_CHUNK = 16  # where products are of float32, which takes twice the registers
LONG = 128
WIDE_COLUMNS = 32  # of a state that a program holds, where products are of float32
COLUMNS = 64  # Trap: of 16 bits not fewer: on Hopper, Triton 3.6 multiplies matrices of 16 and 32 columns
# wrongly, or reads past its shared memory (triton#11366); tests/gpu/test_scans.py has the widths that showed it
TOKENS = 32  # of Mamba-1 that are joined at once
NUMBERS = 2048  # decays of tokens, channels and states that a program holds

NARROW = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # operands of products; sums and states are float32


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, states: Tensor, extends: Extends
) -> bool:
    """As `gated_delta_extend`; False for longer keys than a program holds."""
    _, heads, k_dim, v_dim = states.shape
    if k_dim > MOST:
        return False
    size, block_k, block_v, narrow = sizes(k_dim, v_dim, value.dtype, solved=True)
    chunks = extends.chunks(size)
    new = torch.empty(len(chunks.rows) * size, heads, v_dim, dtype=value.dtype, device=value.device)
    reads = torch.empty(len(chunks.rows) * size, heads, k_dim, dtype=value.dtype, device=value.device)
    launch(
        solve_chunks, (len(chunks.rows), heads),
        key, value, g, beta, chunks.rows, chunks.real, new, reads, *key.stride(), *value.stride(), *g.stride(), *beta.stride(), EPS,
        REPEATS=heads // key.shape[1], HEADS=heads, K=k_dim, V=v_dim, NORMALISE=normalise, CHUNK=size, BLOCK_K=block_k, BLOCK_V=block_v,
        NARROW=narrow,
    )  # fmt: skip
    _scan(query, key, value, g, beta, (new, reads), output, states, extends, k_dim**-0.5, normalise)
    return True


def mamba2(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, low: float, high: float, states: Tensor, extends: Extends
) -> bool:
    """As `mamba2_extend`; False for larger states of a channel than a program holds."""
    if states.shape[3] > MOST:
        return False
    step = dt.clamp(low, high).float()
    _scan(c, b, x, step * a.float(), step, None, output, states.transpose(2, 3), extends, 1.0, False)
    return True


def mamba1(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, states: Tensor, extends: Extends) -> bool:
    """As `mamba1_extend`; False for larger states of a channel than a program holds."""
    _, channels, n_dim = states.shape
    block_n = triton.next_power_of_2(n_dim)
    block_c = NUMBERS // (TOKENS * block_n)
    if not block_c:
        return False
    launch(
        scan_channels, (len(extends.lengths), triton.cdiv(channels, block_c)),
        x, dt, a, b, c, output, states, *_where(extends, TOKENS), *x.stride(), *dt.stride(), *a.stride(), *b.stride(), *c.stride(),
        output.stride(0), states.stride(0), C=channels, N=n_dim, BLOCK_T=TOKENS, BLOCK_C=block_c, BLOCK_N=block_n,
    )  # fmt: skip
    return True


def _scan(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, solved: tuple[Tensor, Tensor] | None, output: Tensor,
    states: Tensor, extends: Extends, scale: float, normalise: bool,
) -> None:  # fmt: skip
    """`states` [slots, H, K, V], in any strides; `solved`: what `solve_chunks` made."""
    _, heads, k_dim, v_dim = states.shape
    size, block_k, block_v, narrow = sizes(k_dim, v_dim, value.dtype, solved is not None)
    launch(
        scan_chunks, (len(extends.lengths), heads, triton.cdiv(v_dim, block_v)),
        query, key, value, g, beta, *(solved or (None, None)), output, states, *_where(extends, size), *query.stride(), *key.stride(),
        *value.stride(), *g.stride(), *beta.stride(), output.stride(0), *states.stride(), scale, EPS, REPEATS=heads // key.shape[1],
        HEADS=heads, K=k_dim, V=v_dim, NORMALISE=normalise, DELTA=solved is not None, CHUNK=size, BLOCK_K=block_k, BLOCK_V=block_v,
        NARROW=narrow, **scan_options(k_dim, solved is not None, narrow),
    )  # fmt: skip


def scan_options(k_dim: int, delta: bool, narrow: Any) -> dict[str, int]:
    """Of `scan_chunks`: the fastest of six, each on an H100, with prompts of 8,192 tokens and sixteen of 512."""
    long = k_dim > LONG
    return {"num_stages": 2 if long and not delta else 1, "num_warps": 8 if long or delta or narrow is None else 4}


def _where(extends: Extends, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From which states the requests go on, and where their chunks lie."""
    return extends.slots_on_device, extends.continues, *extends.bounds(size)


def sizes(k_dim: int, v_dim: int, dtype: torch.dtype, solved: bool) -> tuple[int, int, int, Any]:
    """Tokens of a chunk, what a program holds of a state's two dimensions, and to what products round."""
    narrow = NARROW.get(dtype)
    least = 16 if narrow is None else COLUMNS  # 16 for products of any kind
    columns = WIDE_COLUMNS if narrow is None else COLUMNS
    block_k, block_v = (max(int(triton.next_power_of_2(size)), least) for size in (k_dim, min(v_dim, columns)))
    size = WIDE_CHUNK if narrow is None else SOLVED_CHUNK if solved or k_dim > LONG else CHUNK
    return size, block_k, block_v, narrow
