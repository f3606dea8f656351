"""`paged-attn generate`: complete prompts with any Hugging Face causal LM."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paged_attn.cli import report
from paged_attn.cli.options import (
    add_checkpoint_options,
    add_lora,
    add_run_options,
    engine_config,
    load_options,
    read_prompts,
    sampling_params,
    set_verbosity,
)
from paged_attn.cli.token_text import completion_text

if TYPE_CHECKING:
    from paged_attn.cli.job import Loaded, Prompt, Run
    from paged_attn.cli.parser import Parser
    from paged_attn.engine.llm import LLM
    from paged_attn.engine.requests.outputs import Completion, TokenEvent

HELP = "complete prompts with a model"


def add_options(parser: Parser) -> None:
    parser.add_model()
    add_checkpoint_options(parser)
    add_lora(parser)
    add_run_options(parser, dtype="auto")


def run(args: argparse.Namespace) -> int:
    """Texts go to stdout, numbers and the check's verdict to stderr (all to stdout with --json). Returns 1 if a check failed. Raises
    KeyboardInterrupt: Ctrl-C, after what there was by then has been written."""
    params, prompts = sampling_params(args), read_prompts(args)
    config = engine_config(args)
    if args.lora is not None:
        if args.check:
            raise ValueError("--check compares with the unmodified model, and --lora changes it; leave one of them out")
        config = config.with_adapters(1)
    if not prompts:
        raise ValueError("no prompt; give --prompt TEXT, --prompt-ids N,..., or --prompt-file FILE (- reads standard input)")
    print(f"loading {args.model}", file=sys.stderr, flush=True)
    set_verbosity(args.verbose)
    from paged_attn.cli.check import check
    from paged_attn.cli.job import RunInterruptedError, load, run_prompts, where_it_runs

    loaded = load(args.model, args.dtype, args.device, config, load_options(args), lora=args.lora)
    print(where_it_runs(loaded.llm), file=sys.stderr)
    try:
        done = run_prompts(loaded.llm, prompts, params, event_printer(args, prompts, loaded.llm), lora=args.lora)
    except RunInterruptedError as interrupted:
        print_interrupted(args, loaded, interrupted.run, len(prompts) * params.n)
        raise
    if not args.stream and not args.json:
        print_texts(loaded, done)
    result = check(loaded.llm, done.completions, params) if args.check else None
    if args.json:
        print_json(args, report.document(loaded, done, result))
    else:
        print(report.numbers_line(done.numbers), file=sys.stderr)
        for line in report.check_lines(result, done.numbers, len(prompts)) if result else ():
            print(line, file=sys.stderr)
    return 1 if result is not None and not result.passed else 0


def event_printer(args: argparse.Namespace, prompts: list[Prompt], llm: LLM) -> Any:
    """What to do with each event: a line of JSON, live text, or nothing."""
    count = args.n or 1
    if args.stream and args.json:
        return lambda number, event: _json_line(number, count, event)
    if args.stream:
        return report.StreamPrinter([prompt for prompt in prompts for _ in range(count)], as_ids=llm.tokenizer is None)
    return lambda number, event: None


def print_interrupted(args: argparse.Namespace, loaded: Loaded, done: Run, num_answers: int) -> None:
    """What there is after Ctrl-C, as it would have been printed at the end, and how many answers are not whole."""
    if args.json:
        print_json(args, report.document(loaded, done, None))
    elif not args.stream:
        print_texts(loaded, done)
    sys.stdout.flush()
    cut_off = num_answers - sum(not is_cut_off(completion) for completion in done.completions)
    print(f"{cut_off} of {num_answers} answers cut off", file=sys.stderr)


def is_cut_off(completion: Completion) -> bool:
    return completion.finish_reason in ("cancelled", "error")


def print_texts(loaded: Loaded, done: Run) -> None:
    """The completion alone for one prompt; each under its prompt for several. After one that was cut off, a line says so."""
    for number, completion in enumerate(done.completions):
        if len(done.completions) > 1:
            print(report.heading(number, completion.prompt or completion.prompt_token_ids))
        print(completion_text(loaded.llm, completion))
        if is_cut_off(completion):
            print(report.dim("[cut off]"))
        if completion.logprobs is not None:
            print(report.logprob_lines(loaded.llm, completion))


def print_json(args: argparse.Namespace, document: dict[str, Any]) -> None:
    """Indented, or on one line after the lines of a stream."""
    print(json.dumps(document, ensure_ascii=False, indent=None if args.stream else 2))


def _json_line(number: int, count: int, event: TokenEvent) -> None:
    index, answer = divmod(number, count)
    print(json.dumps({**asdict(event), "index": index, "answer": answer}, ensure_ascii=False), flush=True)
