"""A tiny model as an engine on a GPU would rewrite it, and what its steps would run with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from paged_attn.check.runs.steps import lengths_of_steps
from paged_attn.compiled.options import CompileOptions
from paged_attn.compiled.steps_ahead import RunsWith
from paged_attn.engine.runners.traced_runner import TracedRunner

PASSES = ("latent_attention", "experts", "scans", "routing", "merge_linears", "gemv")


def traced(model: nn.Module) -> TracedRunner:
    return TracedRunner(model, CompileOptions(inductor=False, self_check=False, passes=PASSES))


def steps_of(runner: TracedRunner, page_size: int) -> RunsWith:
    """With our kernels for all of its scans."""
    layers = [
        replace(layer, scans=tuple(replace(each, name="triton", rest="triton") for each in layer.scans)) for layer in runner.recurrent
    ]
    return RunsWith("triton", page_size, False, tuple(layers), lengths_of_steps(torch.device("cpu")))
