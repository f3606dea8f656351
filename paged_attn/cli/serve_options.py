"""Flags of `paged-attn serve`, and the settings that they become."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields

from paged_attn.chat.answers.reasoning import REASONING_PARSERS
from paged_attn.chat.formats.choose import TOOL_PARSERS
from paged_attn.cli.options import add_chat_template, add_checkpoint_options, add_device_options, add_engine
from paged_attn.engine.model.task import TASKS
from paged_attn.server.settings import LIMITS, ServerSettings

API_KEY_VARIABLE = "PAGED_ATTN_API_KEY"
DEFAULTS = {setting.name: setting.default for setting in fields(ServerSettings)}
PARSERS = (
    ("--tool-parser", "the format of tool calls; auto is what the tokenizer or the chat template shows", TOOL_PARSERS),
    ("--reasoning-parser", "the tags of reasoning; auto is what the tokenizer or the chat template shows", REASONING_PARSERS),
)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--host", default=DEFAULTS["host"], help="address to listen on; 0.0.0.0 is every one of IPv4 (default: %(default)s)")
    add("--port", type=int, default=DEFAULTS["port"], help="0 takes a free one (default: %(default)s)")
    add("--uds", metavar="PATH", help="a path to listen on instead of an address, as a Unix socket")
    add("--ssl-certfile", metavar="FILE", help="a PEM file of a certificate (and those that sign it), for HTTPS")
    add("--ssl-keyfile", metavar="FILE", help="a PEM file of its key, if the certificate's holds none")
    add(
        "--api-key", action="append", default=[], metavar="KEY",
        help=f"opens /v1; may be given many times; without any, /v1 is open. {API_KEY_VARIABLE} is one more, and not shown by ps",
    )  # fmt: skip
    add("--share-prefixes", action="store_true", help="share cached prefixes between API keys: a key can then find out what others ask")
    add("--allow-priority", action="store_true", help="let requests have a priority; without it nobody may jump the queue")
    add("--lora-folder", metavar="DIR", help="let clients load adapters from this folder and unload them; without it they may not")
    add("--allow-origin", action="append", default=[], metavar="URL", help="let web pages of this origin use the server (CORS); * is all")
    add("--allow-host", action="append", default=[], metavar="NAME", help="what the header Host may say, as in *.example.com")
    add("--no-log-requests", action="store_true", help="no line of JSON on stdout for each request")
    add("--otlp-endpoint", metavar="URL", help="where OpenTelemetry traces go, such as http://localhost:4318/v1/traces")
    limits = parser.add_argument_group("limits of the server").add_argument
    for limit in LIMITS:
        kind = int if "int" in str(limit.type) else float
        metavar = "N" if kind is int else "MIB" if limit.name.endswith("_mib") else "S"
        shown = "no limit" if limit.default is None else f"{limit.default:g}"
        text = f"{limit.metadata['help']} (default: {shown})"
        limits(f"--{limit.name.replace('_', '-')}", type=kind, metavar=metavar, default=limit.default, help=text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """For whatever answers requests: the model's names and task, its adapters, how chats are written and read, how it is read and run."""
    add = parser.add_argument_group("requests").add_argument
    add("--task", default="auto", choices=TASKS, help="what the model is for (default: as the checkpoint says)")
    add(
        "--served-model-name", nargs="+", action="extend", metavar="NAME",
        help="what clients call the model; of several names answers have the first (default: the hub id, or the directory's name)",
    )  # fmt: skip
    add(
        "--lora", action="append", default=[], metavar="NAME=FOLDER", type=_named_folder,
        help="an adapter of peft, which requests choose by model=NAME; may be given many times",
    )  # fmt: skip
    chats = parser.add_argument_group("chats")
    add_chat_template(chats)
    for flag, what, known in PARSERS:
        chats.add_argument(flag, default="auto", metavar="NAME", help=f"{what}: {', '.join(known)} (default: auto)")
    add_device_options(parser, dtype="auto")
    add_checkpoint_options(parser)
    add_engine(parser)


def _named_folder(text: str) -> tuple[str, str]:
    name, is_given, folder = text.partition("=")
    if not name or not is_given or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not a NAME=FOLDER")
    return name, folder


def served_names(args: argparse.Namespace, model_name: str) -> str | tuple[str, ...]:
    """What requests call the model: `--served-model-name`, or else its own name."""
    return model_name if args.served_model_name is None else tuple(args.served_model_name)


def server_settings(args: argparse.Namespace, model_name: str) -> ServerSettings:
    """Raises ValueError for a setting out of range."""
    keys = [*args.api_key, *filter(None, [os.environ.get(API_KEY_VARIABLE)])]
    same = {setting.name: getattr(args, setting.name) for setting in fields(ServerSettings) if hasattr(args, setting.name)}
    return ServerSettings(
        served_names(args, model_name), api_keys=tuple(keys), allow_origins=tuple(args.allow_origin),
        allow_hosts=tuple(args.allow_host), log_requests=not args.no_log_requests, **same,
    )  # fmt: skip
