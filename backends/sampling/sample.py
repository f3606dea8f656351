"""Samples tokens from the softmax of each row of logits, after top-k, top-p and min-p, in a dozen short kernels.

Sorting 128,256 logits for each of 128 requests takes 3 ms on an H200, a third of the step of the 8B model that computes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.machine import machine_of, power_of_2
from paged_attn.backends.sampling.sample_kernel import MOST_BITS, choose, draw, spread, weigh
from paged_attn.backends.sampling.sampling_tensors import SamplingTensors

PART = 2048  # logits per program
DIGITS = ((21, 11), (10, 11), (0, 10))  # (lowest bit, number of bits) of each digit of a key, highest first
SUM_BITS = 62
WARPS = 4
_spread, _choose, _weigh, _draw = FastKernel(spread), FastKernel(choose), FastKernel(weigh), FastKernel(draw)


class Limits(NamedTuple):
    """keys [N] int64: the lowest key that may be sampled (keys are ordered like logits), -1 for any; drops [N] int64: how many of the
    tokens with that key may not be sampled, those with the lowest ids."""

    keys: Tensor
    drops: Tensor


def sample_tokens(logits: Tensor, best: Tensor, of: SamplingTensors) -> Tensor:
    """logits [M, V], with a dtype and layout that `greedy.serves`; best [M] int64, their most likely tokens -> [N] int64.

    `engine/sampling/sample_tokens.py` defines the distribution. A row's token depends, bit for bit, only on its own logits and settings.
    """
    sampling = Sampling(logits, best, of)
    return sampling.draw(sampling.find_limits(), of.uniform)


def sample_in_place(logits: Tensor, best: Tensor, of: SamplingTensors) -> None:
    """As `sample_tokens`, but each token replaces the row's most likely one, unless that is below 0: the row's logits are not finite."""
    sampling = Sampling(logits, best, of)
    sampling.draw(sampling.find_limits(), of.uniform, in_place=True)


class Sampling:
    """State shared by the launches of one step; the arguments are those of `sample_tokens`."""

    def __init__(self, logits: Tensor, best: Tensor, of: SamplingTensors) -> None:
        self.logits, self.of = logits, of
        self.vocabulary, self.stride, self.count = logits.shape[1], logits.stride(0), len(of.rows)
        self.parts = triton.cdiv(self.vocabulary, PART)
        self.device, early = device_index(logits.device), machine_of(logits.device).early
        self.options = {"num_warps": WARPS, "launch_pdl": early}
        scale = float(2 ** (SUM_BITS - self.vocabulary.bit_length()))
        self.constants = {"SCALE": scale, "EARLY": early}
        self.key = (logits.dtype, self.vocabulary, self.stride, self.parts)
        self.common = (logits, of.rows, best, of.temperature)

    def find_limits(self) -> Limits | None:
        top_k = None if self.of.lowest is None else self._search(count=True, floors=None)
        return top_k if self.of.left_out is None else self._search(count=False, floors=top_k)

    def draw(self, limits: Limits | None, uniform: Tensor, in_place: bool = False) -> Tensor:
        weights, ties = self._ints(self.count, self.parts), self._ints(self.count, self.parts)
        tokens = self.common[2] if in_place else self._ints(self.count)
        keys, drops = (weights, weights) if limits is None else limits  # not read
        numbers = (self.vocabulary, self.stride, self.parts)
        parts = {**self.constants, "LIMITED": limits is not None, "HAS_MIN_P": self.of.min_p is not None, "PART": PART}
        whole = parts | {"PARTS": power_of_2(self.parts)}
        key = (*self.key, limits is not None, self.of.min_p is not None)
        inputs = (*self.common, self.of.temperature if self.of.min_p is None else self.of.min_p)
        _weigh(key, (self.count, self.parts), (*inputs, keys, weights, ties, *numbers), parts, self.options, self.device)
        arguments = (*inputs, keys, drops, weights, ties, uniform, tokens, *numbers)
        _draw((*key, in_place), (self.count, 1), arguments, whole | {"IN_PLACE": in_place}, self.options, self.device)
        return tokens

    def _search(self, count: bool, floors: Limits | None) -> Limits:
        of, first = self.of, self.of.first_limited
        found, limits = self._ints(self.count, 3), Limits(self._ints(self.count), self._ints(self.count))
        sums = torch.zeros(self.count, 2**MOST_BITS.value, dtype=torch.int64, device=self.logits.device)
        lowest = of.rows if of.lowest is None else of.lowest  # only one of the two is read
        shares = of.temperature if of.left_out is None else of.left_out
        floor_keys = limits.keys if floors is None else floors.keys
        spread_inputs = (*self.common, floor_keys, found, sums, self.vocabulary, self.stride, first)
        choose_inputs = (*self.common, lowest, shares, floor_keys, found, sums, *limits, self.vocabulary, self.stride, first)
        for shift, bits in DIGITS:
            key = (*self.key, count, floors is not None, shift)
            constants = {"COUNT": count, "HAS_FLOOR": floors is not None, "FIRST": shift == DIGITS[0][0], "BITS": bits, **self.constants}
            spreading = {**constants, "SHIFT": shift, "PART": PART}
            _spread(key, (self.count - first, self.parts), spread_inputs, spreading, self.options, self.device)
            _choose((*key, shares.dtype), (self.count, 1), choose_inputs, {**constants, "LAST": shift == 0}, self.options, self.device)
        return limits

    def _ints(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self.logits.device)
