"""`python -m tests.check [FAMILIES...] [--report]`: families x dtypes x wrappers, each checked as it is and with errors planted; with
--report docs/self_check.md gets the table. It takes an hour on two cores."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "self_check.md"
BEGIN, END = "<!-- made by python -m tests.check --report -->", "<!-- end -->"
FAMILIES = (
    "llama", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "gpt_oss", "qwen3_moe", "mixtral", "deepseek_v2", "glm4_moe",
    "qwen3_next", "falcon_h1", "bamba",
)  # fmt: skip


def results_of(family: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PAGED_ATTN_CACHE": "none"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.check.run_one", family], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(f"{family}: {len(results)} results, {sum(bool(r['alarm']) for r in results)} false alarms, "
          f"{sum(bool(r.get('missed')) for r in results)} with missed errors", flush=True)  # fmt: skip
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return results


def table(results: list[dict[str, Any]]) -> str:
    """Rows are families, columns wrappers; a cell has one word for each dtype, or one for all where they are alike."""
    wrappers = list(dict.fromkeys(result["wrapper"] for result in results))
    notes: dict[str, str] = {}
    lines = ["| | " + " | ".join(wrappers) + " |", "|---" * (len(wrappers) + 1) + "|"]
    for family in dict.fromkeys(result["family"] for result in results):
        cells = []
        for wrapper in wrappers:
            words = [word(r, notes) for r in results if (r["family"], r["wrapper"]) == (family, wrapper)]
            cells.append(words[0] if len(set(words)) == 1 else ", ".join(words))
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
    parser.add_argument("--report", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "self_check.json", help="where all results go")
    options = parser.parse_args()
    with ThreadPoolExecutor(options.workers) as pool:
        results = [result for each in pool.map(results_of, options.families) for result in each]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))
    made = table(results)
    print(made)
    if options.report:
        page = PAGE.read_text()
        head, _, rest = page.partition(BEGIN)
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}, CPU"
        PAGE.write_text(f"{head}{BEGIN}\n{versions}\n\n{made}\n{END}{rest.partition(END)[2]}")
    return int(any(result["alarm"] or result.get("missed") for result in results))


if __name__ == "__main__":
    sys.exit(main())
