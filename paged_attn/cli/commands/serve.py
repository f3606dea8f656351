"""`paged-attn serve`: an OpenAI-compatible HTTP server for one model."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import signal
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paged_attn.attn_ops.install_line import install_line
from paged_attn.cli.options import engine_config, load_options, set_verbosity, use_template
from paged_attn.cli.serve_options import add_model_options, add_server_options, server_settings
from paged_attn.engine.config import LORAS
from paged_attn.engine.model.load_options import checked_model_path
from paged_attn.parallel.torchrun import is_first, num_processes

if TYPE_CHECKING:
    from paged_attn.cli.parser import Parser
    from paged_attn.engine.config import EngineConfig
    from paged_attn.engine.engine import Engine
    from paged_attn.engine.llm import LLM

HELP = "serve a model over HTTP with OpenAI's routes"
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "jinja2")


def add_options(parser: Parser) -> None:
    parser.add_model()
    add_server_options(parser)
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; 0 after an orderly end. Raises ValueError: a setting out of range, an extra that is missing, or a
    model that cannot be loaded; OSError: the address cannot be listened on."""
    config = engine_config(args)
    config = config.with_(max_batch_tokens=config.step_tokens)  # long prompts must not hold up the tokens of others for long
    if args.lora or args.lora_folder is not None:
        config = config.with_adapters(max(LORAS, len(args.lora)))
    if not is_first():
        return _follow(args, config)
    check_extra()
    checked_model_path(args.model, args.gguf_file)
    settings = server_settings(args, model_name(args.model))
    if taken := [name for name in settings.names if name in dict(args.lora)]:
        raise ValueError(f"--lora {taken[0]}=...: that is the name of the model itself; choose another")
    set_verbosity(args.verbose)
    from paged_attn.server.run import Server, allow_files, listen, url_of

    allow_files(settings)
    socket = listen(settings)
    url = url_of(socket, settings)
    started = time.perf_counter()

    def ready(engine: Engine) -> None:
        what = f"{engine.selection.describe()}, {engine.kv.num_usable:,} KV pages of {engine.config.page_size}"
        print(f"ready on {url} after {time.perf_counter() - started:.1f} s: {what}", file=sys.stderr, flush=True)

    def drains(calls: int) -> None:
        what = f"{calls} request{'s' * (calls > 1)} may go on for {settings.drain_seconds:g} s, and nothing new is taken"
        print(f"ending: {what}; Ctrl-C again ends at once", file=sys.stderr, flush=True)

    with ExitStack() as afterwards:
        make_engine = partial(_engine, args, config, afterwards)
        server = Server(make_engine, settings, on_ready=ready, on_drain=drains, log_level="info" if args.verbose else "warning")
        names = " and ".join(map(repr, settings.names))
        print(f"listening on {url}; loading {args.model} as {names} (GET /health says when it is ready)", file=sys.stderr)
        server.run(sockets=[socket])
    if server.fatal_error is not None:
        raise server.fatal_error
    return 0


def check_extra() -> None:
    """Raises ValueError if packages of the extra `serve` are missing."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(f"the server needs {', '.join(missing)}; install the extra: {install_line('serve')}")


def model_name(model: str) -> str:
    """A hub id as it is; of a directory its name."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else model


def _engine(args: argparse.Namespace, config: EngineConfig, afterwards: ExitStack) -> Engine:
    """What is still to be done when the server has ended goes into `afterwards`."""
    llm = load_llm(args, config)
    if num_processes() > 1:
        from paged_attn.engine.lead import first_rank_leads

        afterwards.enter_context(first_rank_leads(llm))
    return llm.engine


def _follow(args: argparse.Namespace, config: EngineConfig) -> int:
    """Do what the first process does until it has ended. Signals are its business: it drains, and these processes with it."""
    from paged_attn.engine.lead import first_rank_leads

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with first_rank_leads(load_llm(args, config)):
        return 0


def load_llm(args: argparse.Namespace, config: EngineConfig) -> LLM:
    """The model with its chat template and adapters."""
    from paged_attn.cli.job import load, where_it_runs

    llm = load(args.model, args.dtype, args.device, config, load_options(args), args.task).llm
    use_template(llm, args.chat_template)
    for name, folder in args.lora:
        llm.load_lora(name, folder)
    print(where_it_runs(llm), file=sys.stderr, flush=True)
    gc.collect()
    gc.freeze()  # otherwise the collector scans all of torch now and then, and no token comes for 0.2 s; the engine lives to the end
    return llm
