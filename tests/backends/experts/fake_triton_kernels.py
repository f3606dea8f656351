"""The functions of sglang-kernel's wheel that experts call, in plain PyTorch, with the signatures of 0.4.2.post2.

They check what the real ones need, and read rows of experts alone: what stands behind the last one is poisoned.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

SIZES = (16, 32, 64, 128)  # of blocks


@dataclass
class GatherIndx:
    src_indx: Tensor
    dst_indx: Tensor


@dataclass
class ScatterIndx:
    src_indx: Tensor
    dst_indx: Tensor


@dataclass
class RaggedTensorMetadata:
    slice_sizes: Tensor
    slice_offs: Tensor
    block_offs_data: Tensor
    block_schedule_data: Tensor


@dataclass
class RoutingData:
    gate_scal: Tensor | None = field()
    expt_hist: Tensor | None = field()
    n_expts_tot: int = field()
    n_expts_act: int = field()
    expt_data: RaggedTensorMetadata | None = None
    expected_tokens_per_expt: int | None = field(default=None)


@dataclass(frozen=True)
class FnSpecs:
    name: str
    fn: Any
    fn_arg_names: tuple[str, ...]
    fn_arg_do_not_specialize: tuple[str, ...] = ()
    reduction_n: int = 1


@dataclass(frozen=True)
class FusedActivation:
    specs: FnSpecs = FnSpecs("dflt", None, ())
    fn_args: tuple[object, ...] = ()


def swiglu_fn(given: Tensor, alpha: float, limit: float | None) -> Tensor:
    gate, up = given[..., ::2], given[..., 1::2]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def make_ragged_tensor_metadata(slice_sizes: Tensor, n_total_rows: int) -> RaggedTensorMetadata:
    assert slice_sizes.ndim == 1 and slice_sizes.dtype == torch.int32 and slice_sizes.is_contiguous()
    assert int(slice_sizes.sum()) <= n_total_rows
    ends = torch.cat((slice_sizes.new_zeros(1), slice_sizes.cumsum(0).int()))
    blocks = [torch.cat((slice_sizes.new_zeros(1), (-(-slice_sizes // size)).cumsum(0).int())) for size in SIZES]
    return RaggedTensorMetadata(slice_sizes, ends, torch.stack(blocks), torch.full((len(SIZES), 1), -1, dtype=torch.int32))


class FakeTritonKernels:
    """`calls` names what ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def matmul_ogs(
        self, x: Tensor, w: Tensor, bias: Tensor | None, routing_data: RoutingData | None = None, gather_indx: GatherIndx | None = None,
        scatter_indx: ScatterIndx | None = None, precision_config: Any = None, betas: Tensor | None = None, gammas: Tensor | None = None,
        out_alpha: float | None = None, y: Tensor | None = None, fused_comm: Any = None, fused_activation: FusedActivation | None = None,
        epilogue: Any = None, y_acc_in: Tensor | None = None, inner_routing_data: Any = None,
    ) -> Tensor:  # fmt: skip
        assert routing_data is not None and routing_data.expt_data is not None and routing_data.expt_hist is not None
        assert all(each is None for each in (precision_config, betas, gammas, out_alpha, y, fused_comm, epilogue, y_acc_in))
        assert x.dim() == 2 and x.stride(1) == 1 and w.dim() == 3 and x.dtype == w.dtype and x.shape[1] == w.shape[1]
        assert len(routing_data.expt_hist) == routing_data.n_expts_tot == len(w)
        assert bias is None or (bias.dtype == torch.float32 and bias.shape == (len(w), w.shape[2]) and bias.stride(1) == 1)
        ends = routing_data.expt_data.slice_offs.tolist()
        indices = scatter_indx or gather_indx
        count = len(x) if indices is None else indices.src_indx.numel()
        specs = (fused_activation or FusedActivation()).specs
        result = x.new_full((count, w.shape[2] // specs.reduction_n), float("nan"))  # what is not written
        for expert, (start, end) in enumerate(pairwise(ends)):
            source = torch.arange(start, end)
            if gather_indx is not None:
                source = torch.div(gather_indx.src_indx[start:end], routing_data.n_expts_act, rounding_mode="trunc").long()
            rows = x[source].float() @ w[expert].float() + (0.0 if bias is None else bias[expert].float())
            if fused_activation is not None:
                rows = specs.fn(rows, *fused_activation.fn_args)
            to = torch.arange(start, end) if scatter_indx is None else scatter_indx.dst_indx[start:end].long()
            result[to] = rows.to(x.dtype)
        if scatter_indx is not None:
            assert routing_data.n_expts_act == 1, "with more, rows are added up"
            assert scatter_indx.src_indx.dim() == scatter_indx.dst_indx.dim() == 1
            result[scatter_indx.src_indx == -1] = 0
        self.calls.append("matmul_ogs" + f", {specs.name}" * (specs.name != "dflt"))
        return result

    def gate(self, name: str, activation: Any) -> Any:
        def and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
            if input.shape[-1] * input.dtype.itemsize % 16 != 0:
                raise ValueError("The pointers must be multiple of 16 bytes.")
            assert input.is_contiguous() and out is None and input.shape[-1] % 16 == 0, "its halves are read in 16 bytes, too"
            self.calls.append(name)
            gate, up = input.float().chunk(2, -1)
            result: Tensor = (activation(gate) * up).to(input.dtype)
            return result

        return and_mul


@contextmanager
def installed() -> Iterator[FakeTritonKernels]:
    fake = FakeTritonKernels()
    names = ("triton_kernels", *(f"triton_kernels.{name}" for name in ("matmul_ogs", "specialize", "swiglu", "tensor")), "sgl_kernel")
    modules = {name: ModuleType(name) for name in names}
    for name in names[1:-1]:
        setattr(modules["triton_kernels"], name.partition(".")[2], modules[name])
    modules["triton_kernels.matmul_ogs"].__dict__.update(
        matmul_ogs=fake.matmul_ogs, GatherIndx=GatherIndx, ScatterIndx=ScatterIndx, RoutingData=RoutingData, FusedActivation=FusedActivation
    )
    modules["triton_kernels.specialize"].__dict__.update(FnSpecs=FnSpecs)
    modules["triton_kernels.swiglu"].__dict__.update(swiglu_fn=swiglu_fn)
    modules["triton_kernels.tensor"].__dict__.update(make_ragged_tensor_metadata=make_ragged_tensor_metadata)
    gates = {"silu_and_mul": F.silu, "gelu_and_mul": F.gelu, "gelu_tanh_and_mul": lambda x: F.gelu(x, approximate="tanh")}
    modules["sgl_kernel"].__dict__.update({name: fake.gate(name, function) for name, function in gates.items()})
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield fake
