"""`paged-attn passes`: the passes over a model's graph, in order, and which can be switched off."""

from __future__ import annotations

import argparse
import shutil

HELP = "list the graph passes in their order"


def run(args: argparse.Namespace) -> int:
    from paged_attn.passes.pass_list import PASSES
    from paged_attn.report.backend_matrix import text_table

    rows = [[each.name, "optional" if each.optional else "always", each.what] for each in PASSES]
    print(text_table(["pass", "runs", "what it does"], rows, shutil.get_terminal_size().columns))
    print("\n--disable-passes NAME,... leaves optional ones out; PAGED_ATTN_DUMP=FOLDER writes the graph before and after each.")
    return 0
