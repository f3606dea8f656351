"""Rows in the Hopper kernel's shared memory: tiles of 2^n columns, so that a row of 192 is a part of 128 and one of 64.

Functions here take a tuple with a tile, or a tensor of sums, for each part, and multiply or move all of them.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def first_width(dim):
    """Columns of the first part: the largest power of two that is at most `dim`; the remaining ones are the second part."""
    return 1 << (dim.bit_length() - 1)


@gluon.constexpr_function
def copy_layout(width):
    """The layout of threads that each move 16 bytes of a row of `width` 16-bit elements."""
    lanes = width // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def sums_layout(width):
    """The layout of sums over `width` columns, in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def allocate_parts(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Shared memory for COUNT tiles of ROWS rows of DIM columns."""
    FIRST: gl.constexpr = first_width(DIM)
    parts = (_allocate(dtype, COUNT, ROWS, FIRST),)
    if DIM > FIRST:
        parts = parts + (_allocate(dtype, COUNT, ROWS, DIM - FIRST),)
    return parts


@gluon.jit
def _allocate(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, WIDTH], layout)


@gluon.jit
def scores_of(q_tiles, buffer, k_tiles, stage, zero):
    """Issues q.K of a block: one product for each part of the columns, accumulated."""
    scores = warpgroup_mma(q_tiles[0].index(buffer), k_tiles[0].index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    for part in gl.static_range(1, len(q_tiles)):
        scores = warpgroup_mma(q_tiles[part].index(buffer), k_tiles[part].index(stage).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def zero_sums(ROWS: gl.constexpr, DIM: gl.constexpr):
    FIRST: gl.constexpr = first_width(DIM)
    sums = (_zeros(ROWS, FIRST),)
    if DIM > FIRST:
        sums = sums + (_zeros(ROWS, DIM - FIRST),)
    return sums


@gluon.jit
def _zeros(ROWS: gl.constexpr, WIDTH: gl.constexpr):
    return gl.zeros([ROWS, WIDTH], gl.float32, layout=sums_layout(WIDTH))


@gluon.jit
def add_values(sums, weights, v_tiles, stage):
    """Issues sums + p.V of a block, one product for each part of the columns."""
    issued = ()
    for part in gl.static_range(len(v_tiles)):
        mine = gl.convert_layout(weights, gl.DotOperandLayout(0, sums[part].type.layout, 2))  # other types, the same registers
        issued = issued + (warpgroup_mma(mine, v_tiles[part].index(stage), sums[part], is_async=True),)
    return issued


@gluon.jit
def finished_sums(issued):
    """Waits for all issued products."""
    if len(issued) == 1:
        return (warpgroup_mma_wait(0, deps=issued),)
    else:
        return warpgroup_mma_wait(0, deps=issued)


@gluon.jit
def scaled_sums(sums, factor):
    """Rows times `factor`."""
    scaled = ()
    for part in gl.static_range(len(sums)):
        scaled = scaled + (sums[part] * gl.convert_layout(factor, gl.SliceLayout(1, sums[part].type.layout))[:, None],)
    return scaled


@gluon.jit
def store_sums(memory, row, sums, DIM: gl.constexpr):
    """Stores sums as rows `row` of float32 memory [rows, DIM]."""
    for part in gl.static_range(len(sums)):
        gl.store(_pointers(memory, row, sums[part], DIM, part), sums[part])


@gluon.jit
def add_stored(sums, memory, row, weight, DIM: gl.constexpr):
    """Sums plus `weight` times rows `row` of memory [rows, DIM], which another program stored."""
    added = ()
    for part in gl.static_range(len(sums)):
        stored = gl.load(_pointers(memory, row, sums[part], DIM, part), cache_modifier=".cg")
        added = added + (sums[part] + stored * gl.convert_layout(weight, gl.SliceLayout(1, sums[part].type.layout))[:, None],)
    return added


@gluon.jit
def _pointers(memory, row, part, DIM: gl.constexpr, index: gl.constexpr):
    # The pointer comes first: offsets of rows and columns would be computed ahead of the loop and need too many registers.
    column = index * first_width(DIM) + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, part.type.layout))
    return memory + (gl.convert_layout(row, gl.SliceLayout(1, part.type.layout)) * DIM)[:, None] + column[None, :]
