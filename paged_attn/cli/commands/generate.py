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
    add_run_options,
    engine_config,
    load_options,
    read_prompts,
    sampling_params,
    set_verbosity,
)

if TYPE_CHECKING:
    from paged_attn.cli.job import Loaded, Run
    from paged_attn.engine.requests.request import TokenEvent


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("generate", help="complete prompts with a model", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="DIR_OR_HUB_ID", help="a directory, a GGUF file, or a hub id like org/name")
    add_checkpoint_options(parser)
    add_run_options(parser, dtype="auto")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Texts go to stdout, numbers and the check's verdict to stderr (all to stdout with --json). Returns 1 if a check failed."""
    params, config, prompts = sampling_params(args), engine_config(args), read_prompts(args)
    if not prompts:
        raise ValueError("no prompt; give --prompt TEXT, or --prompt-file FILE (- reads standard input)")
    set_verbosity(args.verbose)
    from paged_attn.cli.check import check
    from paged_attn.cli.job import load, run_prompts, where_it_runs

    loaded = load(args.model, args.dtype, args.device, config, load_options(args))
    print(where_it_runs(loaded.llm), file=sys.stderr)
    done = run_prompts(loaded.llm, prompts, params, event_printer(args, prompts))
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


def event_printer(args: argparse.Namespace, prompts: list[str]) -> Any:
    """What to do with each event: a line of JSON, live text, or nothing."""
    if args.stream:
        return _json_line if args.json else report.StreamPrinter(prompts)
    return lambda number, event: None


def print_texts(loaded: Loaded, done: Run) -> None:
    """The completion alone for one prompt; each under its prompt for several."""
    for number, completion in enumerate(done.completions):
        if len(done.completions) > 1:
            print(report.heading(number, completion.prompt))
        print(completion.text)
        if completion.logprobs is not None:
            print(report.logprob_lines(loaded.llm, completion))


def print_json(args: argparse.Namespace, document: dict[str, Any]) -> None:
    """Indented, or on one line after the lines of a stream."""
    print(json.dumps(document, ensure_ascii=False, indent=None if args.stream else 2))


def _json_line(number: int, event: TokenEvent) -> None:
    print(json.dumps({**asdict(event), "index": number}, ensure_ascii=False), flush=True)
