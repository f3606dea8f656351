"""Numbers that go to a device, also while kernels are compiled ahead, with fake tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from paged_attn.attn_ops.batch.packed_ints import copy_to_device, pinned

NUMBERS = [np.arange(70_000), np.array([[True], [False]]), np.zeros((0, 3), np.int32)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("numbers", NUMBERS)
def test_they_arrive(numbers: np.ndarray) -> None:
    got = copy_to_device(numbers, torch.device(DEVICE))
    assert got.device.type == DEVICE and torch.equal(got.cpu(), torch.from_numpy(numbers))


@pytest.mark.parametrize("numbers", NUMBERS[:2])
def test_fake_tensors_are_pinned_as_well(numbers: np.ndarray) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        got = pinned(torch.from_numpy(numbers))
    assert (got.shape, got.dtype) == (numbers.shape, torch.from_numpy(numbers).dtype)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_gpu_reads_them_by_itself() -> None:
    assert pinned(torch.arange(3)).is_pinned()
