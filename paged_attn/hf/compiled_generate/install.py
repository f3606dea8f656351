"""Turns a compiled model's calls into `PagedCalls` at its first call."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from paged_attn.calling.uncompiled import CALL
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.config import EngineConfig
from paged_attn.hf.compiled_generate.paged_calls import PagedCalls

_MODULE_CALL = nn.Module._wrapped_call_impl.__code__


def install_paged_calls(options: CompileOptions) -> None:
    """Called from a running graph: gives the module whose call it is `PagedCalls`, if `module.compile()` compiled it and it has
    transformers' `generate`. After another `module.compile()`, and in a copy of the module, this starts over.

    The module is found on the stack, since Dynamo runs one graph for all modules of a class.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _MODULE_CALL:
        frame = frame.f_back
    if frame is None:
        return
    module: Any = frame.f_locals["self"]
    compiled = vars(module).get(CALL)
    if compiled is None or isinstance(compiled, PagedCalls) or not isinstance(module, PreTrainedModel) or not module.can_generate():
        return
    if module.config.is_encoder_decoder:
        return
    given: dict[str, Any] = {"prefix_cache": False, "generation_config": "ours"}  # nothing is sampled here
    if options.inductor is not None:
        given["inductor"] = options.inductor
    if not options.self_check:
        given["self_check"] = False
    calls = PagedCalls(module, compiled, EngineConfig.from_environment(**given))
    calls.remember_first(dict(frame.f_locals["kwargs"]))
    vars(module)[CALL] = calls
