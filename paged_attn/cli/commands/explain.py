"""`paged-attn explain`: what would be rewritten in a model, how each layer is proved, and which backend would run it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from paged_attn.cli.options import DTYPES, add_checkpoint_options, load_options, set_verbosity
from paged_attn.cli.parser import Parser

HELP = "show what is rewritten in a model, and why"


def add_options(parser: Parser) -> None:
    parser.add_model("a directory, or a hub id; it is loaded on the CPU")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto is the checkpoint's own")
    add_checkpoint_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    set_verbosity(args.verbose)
    from paged_attn.engine.model.loading import load_model
    from paged_attn.report.inspection import explanation

    model, _ = load_model(args.model, args.dtype, "cpu", options=load_options(args))
    found = explanation(model)
    print(json.dumps(asdict(found), indent=2) if args.json else found.text())
    return 0
