"""The variant of a rewritten graph whose linear layers add each row's adapter; the graph without adapters stays unchanged beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paged_attn.attn_ops.specs.lora import LoraSite
from paged_attn.capture.compiled_pieces.artifacts import ArtifactCache
from paged_attn.capture.compiled_pieces.pieces import compile_pieces
from paged_attn.capture.split.split_graph import SplitGraph, split_graph
from paged_attn.capture.split.split_ops import split_ops
from paged_attn.passes.fx.graph_tools import copy_graph_module, value_of
from paged_attn.passes.optimize.linears.lora import insert_lora
from paged_attn.passes.optimize.linears.merge import Merge
from paged_attn.passes.optimize.linears.mergeable_weights import Memory, is_ordinary_parameter
from paged_attn.passes.report import Rewrite

logger = logging.getLogger("paged_attn")


@dataclass(frozen=True, eq=False)
class LoraGraph:
    """Attributes:
    split: takes the inputs of the graph without adapters, then what `insert_lora` says.
    sites: where adapters are added, in the order of those inputs.
    widened: the weights and biases, one or several merged ones each, behind which it finds spare rows; both graphs read the same memory.
    """

    split: SplitGraph
    sites: tuple[LoraSite, ...]
    widened: tuple[Merge, ...]

    @classmethod
    def of(cls, found: Rewrite, example_inputs: Sequence[Any], model: nn.Module, slots: int, rank: int, inductor: bool) -> LoraGraph:
        """Inside the Dynamo backend call in which the graph was rewritten. `slots`, `rank`: as of `insert_lora`; inductor: compile the
        pieces."""
        assert found.gm is not None
        gm = copy_graph_module(found.gm)
        paths = linear_layers(model)
        modules = {index: paths[id(value)] for index, value in enumerate(example_inputs) if id(value) in paths}
        memory = Memory([*example_inputs, *model.parameters(), *model.buffers()])

        def may_move(index: int) -> bool:
            return is_ordinary_parameter(example_inputs[index]) and memory.is_own(example_inputs[index])

        sites, widened = insert_lora(gm.graph, list(found.form.roles.values()), found.merges, modules, slots, rank, may_move)
        gm.recompile()
        split = split_graph(gm, split_ops())
        if inductor:
            compile_pieces(split, [value_of(node) for node in gm.graph.nodes if node.op == "placeholder"], ArtifactCache.of_user())
        logger.info(
            "adapters can be added at %d products of %d linear layers; %d of the products take their first factors as rows of the weight",
            len(sites), sum(len(site.parts) for site in sites), sum(site.weight is not None for site in sites),
        )  # fmt: skip
        return cls(split, sites, widened)


def linear_layers(model: nn.Module) -> dict[int, str]:
    """Identity of a weight -> path of the one plain linear layer (torch's, or GPT-2's Conv1D) that has it."""
    from transformers.pytorch_utils import Conv1D

    found: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D) and isinstance(module.weight, torch.Tensor):
            found.setdefault(id(module.weight), []).append(path)
    return {weight: paths[0] for weight, paths in found.items() if len(paths) == 1}
