"""Results that a kernel writes to the host, and how long their memory is kept."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from paged_attn.backends.host_memory import deliver

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", sorted(deliver.DTYPES, key=str))
@pytest.mark.parametrize("shape", [(1,), (3, 5), (deliver.BLOCK + 1,)])
def test_the_host_has_the_numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numbers = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e6).to(DEVICE, dtype)
    memory = torch.full((numbers.numel() + 2,), 7, dtype=dtype, pin_memory=DEVICE.type == "cuda")
    given = [numbers, numbers[:1]]
    hosts = [memory[: numbers.numel()].view(shape), torch.empty_like(numbers[:1], device="cpu", pin_memory=DEVICE.type == "cuda")]
    deliver.deliver(given, hosts)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert all(torch.equal(host, tensor.cpu()) for host, tensor in zip(hosts, given, strict=True))
    assert memory[numbers.numel() :].tolist() == [7, 7]


@pytest.mark.parametrize(
    ("served", "tensors"),
    [
        (True, [torch.zeros(4, dtype=torch.int64), torch.zeros(2, 3)]),
        (True, [torch.zeros(deliver.MOST_BYTES // 8, dtype=torch.int64)]),
        (False, [torch.zeros(4, dtype=torch.int64), torch.zeros(2, 3).t()]),
        (False, [torch.zeros(4, dtype=torch.int64), torch.zeros(deliver.MOST_BYTES // 4 + 1)]),
        (False, [torch.zeros(4, dtype=torch.float64)]),
        (False, [torch.zeros(0, dtype=torch.int64)]),
    ],
)
def test_few_numbers_are_served_all_or_none(served: bool, tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not deliver.serves(tensors), "on a CPU"
    monkeypatch.setattr(deliver, "device_word", lambda device: "cuda")
    assert deliver.serves(tensors) is served
