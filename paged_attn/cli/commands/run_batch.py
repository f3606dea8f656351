"""`paged-attn run-batch`: answer a file of requests, in the form of OpenAI's Batch API, and write a file of answers."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paged_attn.cli.commands.serve import check_extra, load_llm, model_name
from paged_attn.cli.options import engine_config, set_verbosity
from paged_attn.cli.serve_options import add_model_options, served_names
from paged_attn.engine.config import LORAS
from paged_attn.engine.model.load_options import checked_model_path

if TYPE_CHECKING:
    from paged_attn.cli.parser import Parser
    from paged_attn.engine.engine import Engine
    from paged_attn.server.batch_file import BatchTotals
    from paged_attn.server.settings import ServerSettings

HELP = "answer a file of requests, one JSON object per line"
MAX_QUEUE = 1 << 20  # prompts: a line may have many


def add_options(parser: Parser) -> None:
    parser.add_model()
    add = parser.add_argument_group("files").add_argument
    add("-i", "--input-file", required=True, type=Path, metavar="FILE", help="requests: custom_id, method, url and body on each line")
    add("-o", "--output-file", required=True, type=Path, metavar="FILE", help="answers, each written when it is complete")
    add("--resume", action="store_true", help="keep the answers that the output file has, and leave out their requests")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if the answer to some request is an error. The input file is checked before the model is loaded.

    Raises:
        ValueError: a line that is not a request, an output file that has answers already, a setting, or a model that cannot be loaded.
        OSError: a file cannot be read or written.
        KeyboardInterrupt: Ctrl-C; what was answered is in the output file.
    """
    config = engine_config(args)
    if args.lora:
        config = config.with_adapters(max(LORAS, len(args.lora)))
    check_extra()
    checked_model_path(args.model, args.gguf_file)
    from paged_attn.server.batch_file import BatchTotals, answered_ids, read_requests
    from paged_attn.server.settings import ServerSettings

    has_answers = args.output_file.exists() and args.output_file.stat().st_size > 0
    if has_answers and not args.resume:
        raise ValueError(f"{args.output_file} has answers already; choose another --output-file, or --resume to go on with it")
    done = answered_ids(args.output_file) if has_answers else set[str]()
    wanted = sum(request.custom_id not in done for request in read_requests(args.input_file))
    settings = ServerSettings(
        served_names(args, model_name(args.model)), max_queue=MAX_QUEUE,
        tool_parser=args.tool_parser, reasoning_parser=args.reasoning_parser,
    )  # fmt: skip
    set_verbosity(args.verbose)
    totals, started = BatchTotals(), time.perf_counter()
    try:
        asyncio.run(_answer_file(args, lambda: load_llm(args, config).engine, settings, done, totals))
    finally:
        tokens = f"{totals.new_tokens:,} new tokens" if totals.new_tokens else "no new tokens"
        print(
            f"{totals.answered} of {wanted} requests answered, {totals.failed} of them with an error, {tokens}, "
            f"in {time.perf_counter() - started:.1f} s",
            file=sys.stderr,
        )
        if totals.first_error:
            print(f"the first error: {totals.first_error}", file=sys.stderr)
    return 1 if totals.failed else 0


async def _answer_file(
    args: argparse.Namespace, make_engine: Callable[[], Engine], settings: ServerSettings, done: set[str], totals: BatchTotals
) -> None:
    from paged_attn.server.app import create_app
    from paged_attn.server.batch_file import answer_requests, read_requests

    app = create_app(make_engine, settings)
    thread = app.state.server.llm.thread
    thread.raises_start_failure = True
    thread.start()
    try:
        await asyncio.to_thread(thread.wait_until_made)
        with args.output_file.open("a", encoding="utf-8") as out:
            at_once = 2 * thread.refuse_unless_ready().config.max_requests  # so that the next ones wait when one ends
            await answer_requests(app, read_requests(args.input_file), done, out, at_once, totals)
    finally:
        await asyncio.to_thread(app.state.server.close)
