"""Makes the runner of a model: traced and rewritten, or hooked."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from paged_attn.attn_ops.batch.packed_ints import FETCH_KERNEL
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.experts import use_experts
from paged_attn.attn_ops.ops.linears.add_norm import ADD_NORM_KERNEL, ADD_NORM_LINEAR_KERNEL
from paged_attn.attn_ops.ops.linears.linear import ONE_ROW_KERNEL
from paged_attn.attn_ops.ops.linears.lora import LORA_KERNEL, LORA_UP_KERNEL
from paged_attn.attn_ops.ops.routing import ROUTE_KERNEL
from paged_attn.backends.devices import device_word, has_triton
from paged_attn.backends.selection.experts import experts_backend
from paged_attn.backends.selection.select import serves_latents
from paged_attn.calling.body import Body
from paged_attn.check.runs.steps import ProbeSettings, lengths_of_steps
from paged_attn.compiled.options import CompileOptions
from paged_attn.compiled.steps_ahead import RunsWith
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.runners.compilers import start_compilers
from paged_attn.engine.runners.hooked_runner import HookedRunner
from paged_attn.engine.runners.runner import Runner
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.engine.tracing.trace_model import only_device
from paged_attn.parallel.local_model import is_cut, served_locally
from paged_attn.passes.optional import OPTIONAL


def make_runner(model: nn.Module, config: EngineConfig) -> Runner:
    """Trace and rewrite the model, or hook its attention, as `config.compile` says; the config is resolved."""
    options = CompileOptions(
        inductor=config.inductor, self_check=config.self_check, experts_backend=config.experts_backend,
        scans_backend=config.scans_backend, state_dtype=config.state_dtype,
        runs_with=RunsWith(
            config.backend, config.page_size, config.deterministic,
            checked=lengths_of_steps(only_device(model)) if config.self_check else (),
        ),
        max_loras=config.max_loras, max_lora_rank=config.max_lora_rank if config.max_loras else 0,
    )  # fmt: skip
    if device_word(only_device(model)) == "cuda" and has_triton():
        from paged_attn.backends.host_memory.fetch import fetch

        FETCH_KERNEL.use(fetch)
    _refuse_scripted(model)
    _refuse_invoked_adapters(model)
    with served_locally(model) as ranks:
        if config.max_loras:
            _refuse_adapters(model, config, ranks is not None)
        if ranks is not None:
            ranks.check_settings(repr(config))
        probe = ProbeSettings(config.backend, config.page_size, config.deterministic, ranks)
        if not config.compile:
            if isinstance(model, Body):
                raise UnsupportedError(f"{model.name} embeds or classifies, which runs traced alone; leave compile=False out")
            return HookedRunner(model, options, config.follow_generate, probe)
        use_experts(lambda name: experts_backend(name).forward)
        start_compilers(only_device(model), config)
        if only_device(model).type == "cuda" and has_triton():
            from paged_attn.backends.experts.triton.route import route
            from paged_attn.backends.linear.add_norm import add_norm, add_norm_linear
            from paged_attn.backends.linear.gemv import one_row_linear

            ONE_ROW_KERNEL.use(one_row_linear)
            ADD_NORM_KERNEL.use(add_norm)
            ADD_NORM_LINEAR_KERNEL.use(add_norm_linear)
            ROUTE_KERNEL.use(route)
            if config.max_loras:
                from paged_attn.backends.lora.on_gpu import lora_on_gpu, lora_up_on_gpu

                LORA_KERNEL.use(lora_on_gpu)
                LORA_UP_KERNEL.use(lora_up_on_gpu)
        on = {
            "latent_attention": serves_latents(config.backend, only_device(model)),
            "linear_float32": not config.deterministic,  # which of its two products runs depends on the number of rows
            "merge_linears": config.merge_linears,
            "early_logits_gather": config.early_logits_gather,
            "gemv": config.gemv,
            "add_norm": config.gemv and not config.deterministic,  # its numbers for one row are not those for several
        }
        passes = tuple(name for name in OPTIONAL if on.get(name, True) and name not in config.disable_passes)
        runner = TracedRunner(model, replace(options, pdl=bool(config.pdl), passes=passes), config.follow_generate, probe)
    cut = [layer.spec.module for layer in runner.recurrent if is_cut(model, layer.module)]
    if ranks is not None and cut:
        runner.close()
        raise UnsupportedError(
            f"{type(model).__name__} is sharded over {ranks.size} ranks, and so is {cut[0]}, which has recurrent state; known are layers "
            "that every rank has whole. Take them out of its tp_plan, or run it whole on each device and share out the requests"
        )
    return runner


def _refuse_scripted(model: nn.Module) -> None:
    """Raises UnsupportedError: a part that torch.jit has compiled, which can neither be traced nor hooked."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{path or 'the model'} is a {type(module).__name__} of torch.jit.script or trace, which can neither be traced nor "
                "hooked; put the module that it was made from in its place"
            )


def _refuse_invoked_adapters(model: nn.Module) -> None:
    """Raises UnsupportedError: an adapter of peft that begins behind certain tokens of a text, which only peft's own call looks for."""
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        for name, config in configs.items() if isinstance(configs, dict) else ():
            if getattr(config, "alora_invocation_tokens", None):
                raise UnsupportedError(
                    f"the adapter {name} has alora_invocation_tokens: it begins behind these tokens of a text, which only peft's own call "
                    "looks for. Generate with that, or take an adapter that has none"
                )


def _refuse_adapters(model: nn.Module, config: EngineConfig, is_sharded: bool) -> None:
    """Raises UnsupportedError if requests cannot choose adapters here; the message says why."""
    if not config.compile:
        why = "compile=False calls the model itself, and adapters by request are part of its graph; leave compile on"
    elif is_sharded:
        why = f"{type(model).__name__} is sharded over ranks, and adapters are not; run it whole on each device"
    elif mine := [path for path, module in model.named_modules() if path and type(module).__module__.startswith("peft.")]:
        why = (
            f"{type(model).__name__} has adapters of peft in it already ({mine[0]} is one of them). Without max_loras and loras it is "
            "served with its active one; for adapters by request save them (save_pretrained), and give LLM the model without "
            "(model.unload())"
        )
    else:
        return
    raise UnsupportedError(f"max_loras={config.max_loras}: {why}")
