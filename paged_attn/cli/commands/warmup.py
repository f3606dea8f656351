"""`paged-attn warmup`: start an engine and run a few tokens, so that compile caches on disk are full when the next process starts."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from paged_attn.cli.options import add_checkpoint_options, add_device_options, add_engine, engine_config, load_options, set_verbosity
from paged_attn.cli.report import bold

if TYPE_CHECKING:
    from paged_attn.cli.parser import Parser
    from paged_attn.engine.config import EngineConfig
    from paged_attn.engine.llm import LLM

HELP = "fill the compile caches for a model, and time its start"
PROMPT_TOKENS = (3, 17, 40)
NEW_TOKENS = 8


def add_options(parser: Parser) -> None:
    parser.add_model()
    add_device_options(parser, dtype="auto")
    add_checkpoint_options(parser)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """What may take long, then seconds per phase and which steps run captured, to stdout."""
    config = engine_config(args)
    set_verbosity(args.verbose)
    from paged_attn.backends.devices import checked_device
    from paged_attn.cli.job import load

    device = str(checked_device(args.device))
    print(bold(f"warming up {args.model} on {device}; what may take long:"))
    for line in coming(config, device):
        print(f"  - {line}")
    print(end="", flush=True)
    loaded = load(args.model, args.dtype, args.device, config, load_options(args))
    with loaded.llm as llm:
        started = time.perf_counter()
        prompts = run_tokens(llm)
        seconds = {
            "load": loaded.load_seconds, **llm.engine.start_seconds, "first token": loaded.warm_up_seconds,
            f"{len(prompts)} prompts": time.perf_counter() - started,
        }  # fmt: skip
        print("\n".join(summary(llm, seconds)))
    return 0


def coming(config: EngineConfig, device: str) -> list[str]:
    """A line for each phase that may take long with these settings, and where its work is kept for the next process."""
    cuda = device.startswith("cuda")
    config = config.resolved(cuda=cuda, has_triton=cuda)
    lines = ["loading the weights"]
    if config.compile:
        lines.append(f"tracing the model and proving each attention layer: seconds; kept in {_folder('graphs')}")
        lines.append("comparing with the model: about a second, again in each process")
    if config.inductor:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        lines.append(f"Inductor compiles the pieces of the graph: up to minutes; kept in {_folder('pieces')} and {cache_dir()}")
    if cuda:
        lines.append("kernels of the attention backend, compiled by Triton or others: up to minutes, kept in their own caches")
        if config.graphs != "off":
            lines.append(f"capturing CUDA graphs for up to {_num_sizes(config)} sizes of steps: again in each process")
    if not cuda and not config.inductor:
        filled = "the traced graph alone is kept" if config.compile else "no cache is filled"
        lines.append(f"nothing is compiled with these settings, so that {filled} (--device cuda, or --inductor)")
    return lines


def run_tokens(llm: LLM) -> list[list[int]]:
    """Prompts as long as the model and its pool allow: alone, then ragged together, then with their prefixes cached; returns them."""
    from paged_attn.engine.sampling_params import SamplingParams

    limits, config, kv = llm.engine.limits, llm.engine.config, llm.engine.kv
    room = min(limits.max_positions or max(PROMPT_TOKENS) + NEW_TOKENS, kv.num_usable * config.page_size)
    new = max(min(NEW_TOKENS, room - 1), 1)
    ids = min(limits.vocab_size or 2, 100)
    prompts = [[(i * 7 + j) % ids for j in range(max(min(count, room - new), 1))] for i, count in enumerate(PROMPT_TOKENS)]
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    for batch in ([prompts[-1]], prompts, prompts):
        llm.generate(batch, params)
    return prompts


def summary(llm: LLM, seconds: dict[str, float]) -> list[str]:
    from paged_attn.report.inspection import explanation

    compiled = explanation(llm).graphs[0].compiled
    lines = [f"  {name:<22} {value:8.2f} s" for name, value in {**seconds, "in all": sum(seconds.values())}.items()]
    lines += [f"  backend      {llm.engine.selection.describe()}"]
    lines += [f"  compiled     {compiled.describe()}"] if compiled is not None else []
    return lines + llm.engine.step_runner.report().lines()


def _folder(kind: str) -> str:
    from paged_attn.capture.compiled_pieces.artifacts import VARIABLE, user_folder

    folder = user_folder(kind)
    return f"no folder of ours ({VARIABLE} is off)" if folder is None else str(folder)


def _num_sizes(config: EngineConfig) -> int:
    from paged_attn.engine.build_runtime import capture_settings

    settings = capture_settings(config, one_row=config.compile)
    return len(settings.extend_order()) + (len(settings.decode_order()) if settings.full else 0)
