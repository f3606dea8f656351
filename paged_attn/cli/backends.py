"""`paged-attn backends`: the support matrix of all registered attention backends."""

from __future__ import annotations

import argparse
from typing import Any

from paged_attn.cli.options import add_common
from paged_attn.cli.report import width


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("backends", help="which attention backend can run what, and here", description=__doc__, allow_abbrev=False)
    add_common(parser)
    parser.add_argument("--markdown", action="store_true", help="the table of the documentation, without this machine's availability")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from paged_attn.backends.matrix import matrix_markdown, matrix_text

    print(matrix_markdown() if args.markdown else matrix_text(width()))
    return 0
