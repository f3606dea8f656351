"""`python -m tests.check [FAMILIES...] [--report]`: families x dtypes x wrappers, each checked as it is and with errors planted; with
--report docs/self_check.md gets the table. It takes an hour on two cores; --from-json makes the table of results that are there."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.check.run_one import DTYPES
from tests.check.wrappers import WRAPPERS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "self_check.md"
BEGIN, END = "<!-- made by python -m tests.check --report -->", "<!-- end -->"
FAMILIES = (
    "llama", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "gpt_oss", "qwen3_moe", "mixtral", "deepseek_v2", "glm4_moe",
    "qwen3_next", "falcon_h1", "bamba",
)  # fmt: skip


def results_of(family: str, wrapper: str) -> list[str]:
    """JSON lines."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PAGED_ATTN_CACHE": "none"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.check.run_one", family, wrapper]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    bad = [line for line in lines if (result := json.loads(line))["alarm"] or result.get("missed")]
    print(family, wrapper, f"{len(lines)} results", *bad, *([done.stderr[-2000:]] if done.returncode else []), flush=True)
    return lines


def table(results: list[dict[str, Any]]) -> str:
    """Rows are families, columns wrappers; a cell has one word for each dtype, or one for all where they are alike."""
    wrappers = [wrapper for wrapper in WRAPPERS if any(result["wrapper"] == wrapper for result in results)]
    notes: dict[str, str] = {}
    lines = ["| | " + " | ".join(wrappers) + " |", "|---" * (len(wrappers) + 1) + "|"]
    for family in dict.fromkeys(result["family"] for result in results):
        cells = []
        for wrapper in wrappers:
            words = [word(r, notes) for r in results if (r["family"], r["wrapper"]) == (family, wrapper)]
            cells.append(words[0] if len(set(words)) == 1 else ", ".join(words) or "not run")
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"- {sign}: {reason}" for reason, sign in notes.items())])


def word(result: dict[str, Any], notes: dict[str, str]) -> str:
    if result["alarm"]:
        return "**false alarm**"
    if result["reason"]:
        return notes.setdefault(result["reason"].replace("|", "\\|"), f"({len(notes) + 1})")
    count = len(result["caught"]) + len(result["missed"])
    missed = f" (**missed: {', '.join(result['missed'])}**)" if result["missed"] else ""
    return f"{len(result['caught'])}/{count}" + " hooked" * (result["way"] == "hooked") + missed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.check")
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--wrappers", nargs="*", default=list(WRAPPERS), choices=WRAPPERS, help="by default all; the table says `not run`")
    parser.add_argument("--report", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "self_check.jsonl", help="where all results go, a line each")
    parser.add_argument("--torch", default=torch.__version__, help="with --from-json: by which torch they were made")
    parser.add_argument("--from-json", action="store_true", help="run nothing: the results are there")
    options = parser.parse_args()
    if not options.from_json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        with options.json.open("w") as file, ThreadPoolExecutor(options.workers) as pool:
            jobs = [pool.submit(results_of, family, wrapper) for family in options.families for wrapper in options.wrappers]
            for job in as_completed(jobs):
                file.writelines(f"{line}\n" for line in job.result())
                file.flush()
    results = [json.loads(line) for line in options.json.read_text().splitlines()]
    results.sort(key=lambda r: (FAMILIES.index(r["family"]), list(WRAPPERS).index(r["wrapper"]), list(DTYPES).index(r["dtype"])))
    made = table(results)
    print(made)
    if options.report:
        page = PAGE.read_text()
        head, _, rest = page.partition(BEGIN)
        versions = f"torch {options.torch}, transformers {transformers.__version__}, CPU"
        PAGE.write_text(f"{head}{BEGIN}\n{versions}\n\n{made}\n{END}{rest.partition(END)[2]}")
    return int(any(result["alarm"] or result.get("missed") for result in results))


if __name__ == "__main__":
    sys.exit(main())
