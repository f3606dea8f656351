"""`paged-attn demo`: the main job on the embedded model, in a few seconds and without a network."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from paged_attn.cli import report
from paged_attn.cli.commands.generate import event_printer, print_json
from paged_attn.cli.options import add_run_options, engine_config, read_prompts, sampling_params, set_verbosity
from paged_attn.cli.token_text import ids_text

if TYPE_CHECKING:
    from paged_attn.cli.job import Loaded, Prompt, Run
    from paged_attn.report.explanation import Explanation

HELP = "see it work on the embedded model"
LETTER = (
    "My dear Harriet, You will be surprised to hear from me so soon, but the weather has kept us within doors since Monday, and my "
    "uncle has nothing to say to any body while it rains. We dined on Tuesday with the Westbrooks. There were fourteen at table, and "
    "the youngest Miss Westbrook played to us afterwards with more spirit than exactness, which every one was good enough to call taste. "
    "Mr. Hartley was of the party. He has taken the house at Ashcombe for the summer, with four thousand a year, it is said, and a sister "
    "to keep it for him; and he spoke to me twice, the second time upon the subject of drains. I tell you all this that you may know "
    "exactly what to think when you see him on Thursday. "
)
PROMPTS = (
    "Emma",
    "It is a truth universally acknowledged, that",
    '"I have not the pleasure of understanding you," said',
    "The evening was quiet and conversable, as he drew his chair close to hers, and looked at the fire without once speaking; and she, who "
    "had prepared herself for every thing but silence, was obliged at last to ask whether the roads were as bad as they had been "
    "represented, and to",
    LETTER + "You must know that I",
    LETTER + "As to his sister,",
)
LATE = 1  # the last prompt arrives while the others run, and finds the letter in the prefix cache


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser, dtype="float32", max_new_tokens=120)


def embedded_model() -> Path | None:
    """Directory of the embedded checkpoint, or None if this installation lacks it."""
    folder = Path(str(files("paged_attn.demo_model")))
    return folder if (folder / "model.safetensors").is_file() else None


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a check failed."""
    params, config, given = sampling_params(args), engine_config(args), read_prompts(args)
    prompts: list[Prompt] = given or list(PROMPTS)
    late = 0 if given else LATE
    folder = embedded_model()
    if folder is None:
        raise ValueError("this installation lacks the embedded model; reinstall paged-attn, or use `paged-attn generate --model ...`")
    print("loading the model that comes with paged_attn", file=sys.stderr, flush=True)
    set_verbosity(args.verbose)
    from paged_attn.cli.check import check
    from paged_attn.cli.job import load, run_prompts
    from paged_attn.report.inspection import explanation

    loaded = load(folder, args.dtype, args.device, config)
    if not args.json:
        _print_start(loaded, explanation(loaded.llm))
        print(f"\n{_batch_title(prompts, late)}\n", flush=True)
    done = run_prompts(loaded.llm, prompts, params, event_printer(args, prompts, loaded.llm), late)
    result = check(loaded.llm, done.completions, params) if args.check else None
    if args.json:
        print_json(args, report.document(loaded, done, result))
    else:
        _print_end(args, loaded, done)
        for line in report.check_lines(result, done.numbers, len(prompts)) if result else ():
            print(report.wrapped(line, ""))
    return 1 if result is not None and not result.passed else 0


def _batch_title(prompts: list[Prompt], late: int) -> str:
    sizes = sorted(len(prompt.encode() if isinstance(prompt, str) else prompt) for prompt in prompts)  # the model's tokens are bytes
    title = f"{len(prompts)} prompts of {sizes[0]} to {sizes[-1]} bytes in one continuous batch"
    return report.bold(title + (", the last arriving while the others run" if late else ""))


def _print_start(loaded: Loaded, found: Explanation) -> None:
    runner, graph = loaded.llm.engine.runner, found.graphs[-1]
    size = sum(parameter.numel() for parameter in runner.model.parameters())
    print(
        report.bold(
            f"{found.model}, {size / 1e6:.1f} M parameters (bytes in, bytes out), {runner.dtype} on {runner.device}".replace("torch.", "")
        )
    )
    print(f"  loaded      in {loaded.load_seconds:.2f} s by transformers; no file of the model was changed")
    checked = " and self-check against the original" if loaded.llm.engine.config.self_check else ""
    print(f"  rewrote     {graph.num_layers} attention layers in {loaded.rewrite_seconds:.2f} s, tracing{checked} included")
    for group in graph.layers:
        print(f"                {group.title}: {group.spec}")
        print(report.dim(f"                  {group.found_by}; {group.proof}"))
        print(report.dim(f"                  {group.declared}"))
    print(f"  warmed up   in {loaded.warm_up_seconds:.2f} s (first token)")
    print(f"  backend     {found.backend_reason}")


def _print_end(args: argparse.Namespace, loaded: Loaded, done: Run) -> None:
    for number, completion in enumerate(done.completions if not args.stream else ()):
        cached = f", {completion.cached_tokens} from the prefix cache" if completion.cached_tokens else ""
        title = f"{len(completion.prompt_token_ids)} prompt tokens{cached}, {len(completion.token_ids)} new ({completion.finish_reason})"
        print(f"{report.bold(f'[{number + 1}]')} {title}")
        print(report.dim(report.wrapped(report.shortened(completion.prompt or ids_text(completion.prompt_token_ids)), "    ")))
        print(report.wrapped(completion.text.strip(), "    > "))
        if completion.logprobs is not None:
            print(report.logprob_lines(loaded.llm, completion))
    print(f"\n{report.wrapped(report.numbers_line(done.numbers), '')}")
