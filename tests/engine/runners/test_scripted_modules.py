"""A part that torch.jit has compiled is refused by its name: Dynamo cannot read it, and it takes no hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paged_attn
from paged_attn import LLM, UnsupportedError
from tests.tiny_models import build_short


def scripted() -> nn.Module:
    model = build_short("qwen3")
    mlp = model.model.layers[0].mlp
    model.model.layers[0].mlp = torch.jit.script(nn.Sequential(mlp.up_proj, nn.SiLU(), mlp.down_proj))
    return model


@pytest.mark.parametrize("compiled", [True, False])
def test_an_engine_names_it(compiled: bool) -> None:
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.mlp is a RecursiveScriptModule of torch\.jit.*put the module that it"):
        LLM(scripted(), compile=compiled, num_pages=40)


def test_patch_refuses_it() -> None:
    with pytest.raises(UnsupportedError, match="not supported on ScriptModules"), paged_attn.patch(scripted()):
        pass
