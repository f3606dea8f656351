"""`paged-attn serve`: an OpenAI-compatible HTTP server for one model."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_attn.cli.options import add_common, add_engine, add_place, engine_config, set_verbosity

if TYPE_CHECKING:
    from paged_attn.engine.config import EngineConfig
    from paged_attn.engine.engine import Engine

API_KEY_VARIABLE = "PAGED_ATTN_API_KEY"
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "jinja2")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP with OpenAI's routes", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="DIR_OR_HUB_ID", help="a directory, or a hub id like org/name")
    add_common(parser)
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one of IPv4 (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add("--served-model-name", metavar="NAME", help="what clients call the model (default: the hub id, or the directory's name)")
    add(
        "--api-key", action="append", default=[], metavar="KEY",
        help=f"opens /v1; may be given many times; without any, /v1 is open. {API_KEY_VARIABLE} is one more, and not shown by ps",
    )  # fmt: skip
    add("--max-queue", type=int, default=1024, metavar="N", help="requests that may wait beyond those that run (default: %(default)s)")
    add("--max-body-mib", type=float, default=16.0, metavar="MIB", help="largest body of a request (default: %(default)g)")
    add(
        "--drain-seconds", type=float, default=30.0, metavar="S",
        help="how long running requests may go on after SIGTERM or Ctrl-C (default: %(default)g)",
    )  # fmt: skip
    add_place(parser, dtype="auto")
    add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; 0 after an orderly end.

    Raises:
        ValueError: a setting out of range, an extra that is missing, or a model that can not be loaded.
        OSError: the address can not be listened on.
    """
    config = engine_config(args)
    config = config.with_(max_batch_tokens=config.step_tokens)  # long prompts must not hold up the tokens of others for long
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(f"the server needs {', '.join(missing)}; install the extra: pip install 'paged-attn[serve]'")
    from paged_attn.server.settings import ServerSettings

    keys = [*args.api_key, *filter(None, [os.environ.get(API_KEY_VARIABLE)])]
    settings = ServerSettings(
        args.served_model_name or model_name(args.model), host=args.host, port=args.port, api_keys=tuple(keys), max_queue=args.max_queue,
        max_body_mib=args.max_body_mib, drain_seconds=args.drain_seconds,
    )  # fmt: skip
    set_verbosity(args.verbose)
    from paged_attn.server.run import Server, listen

    socket = listen(settings)
    host, port = socket.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = Server(lambda: _engine(args, config, url), settings, log_level="info" if args.verbose else "warning")
    print(f"listening on {url}; loading {args.model} as {settings.model_name!r} (GET /health says when it is ready)", file=sys.stderr)
    server.run(sockets=[socket])
    if server.load_error is not None:
        raise server.load_error
    return 0


def model_name(model: str) -> str:
    """A hub id as it is; of a directory its name."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else model


def _engine(args: argparse.Namespace, config: EngineConfig, url: str) -> Engine:
    from paged_attn.cli.job import load

    started = time.perf_counter()
    engine = load(args.model, args.dtype, args.device, config).llm.engine
    gc.collect()
    gc.freeze()  # else Python looks through all of torch every now and then, and for 0.2 s no token comes; the engine stays to the end
    what = f"{engine.selection.describe()}, {engine.kv.num_usable:,} KV pages of {engine.config.page_size}"
    print(f"ready on {url} after {time.perf_counter() - started:.1f} s: {what}", file=sys.stderr, flush=True)
    return engine
