"""`python -m tests.zoo [TYPES...] [--report]`: try every causal-LM type, each in a process of its own, and write docs/models.md.

Results are kept in build/zoo, by the versions of torch and transformers and a fingerprint of this project's sources, so that an interrupted
sweep goes on where it stopped and no result outlives the code that gave it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.zoo.configs import TYPES
from tests.zoo.report import counts, with_other_rows, write_report

ROOT = Path(__file__).resolve().parents[2]
BAD_BF16 = ("refused", "further")
SOURCES = ("attn_ops", "backends", "capture", "paged_attn", "passes", "tests/zoo")


def results_folder() -> Path:
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return ROOT / "build" / "zoo" / f"torch-{torch.__version__}_transformers-{transformers.__version__}_{digest.hexdigest()[:10]}"


def try_type(model_type: str, timeout: float) -> dict[str, Any]:
    """The JSON of run_one, or what became of the process."""
    started = time.perf_counter()
    report = {"type": model_type, "features": [], "found_by": [], "torch": torch.__version__, "transformers": transformers.__version__}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.zoo.run_one", model_type],
            cwd=ROOT, env=environment, timeout=timeout, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return report | {"result": "timeout", "reason": f"stopped after {timeout:g} s", "seconds": timeout}
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        reason = f"the process ended with status {done.returncode}: {last[:200]}"
        return report | {"result": "crash", "reason": reason, "seconds": round(time.perf_counter() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("types", nargs="*", help="model types; default: all of them. With --report the rows of others stay as they are")
    parser.add_argument("--report", action="store_true", help="write docs/models.md")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="forget the results of an earlier run")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one type")
    parser.add_argument("--output", type=Path, help="where --report writes; default: docs/models.md")
    options = parser.parse_args()
    if unknown := sorted(set(options.types) - set(TYPES)):
        parser.error(f"no causal-LM types of transformers {transformers.__version__}: {', '.join(unknown)}")
    types = tuple(options.types) or TYPES
    folder = results_folder()
    folder.mkdir(parents=True, exist_ok=True)

    def one(model_type: str) -> dict[str, Any]:
        kept = folder / f"{model_type}.json"
        if kept.exists() and not options.fresh:
            found: dict[str, Any] = json.loads(kept.read_text())
            return found
        found = try_type(model_type, options.timeout)
        kept.write_text(json.dumps(found, indent=1))
        bf16 = found.get("bf16", {})
        words = f"{found['result']:10} {model_type:24} {found.get('seconds', 0):6.1f} s  {found['reason'][:120]}"
        print(words, *(bf16[name] for name in ("result", "ours", "theirs", "reason") if name in bf16), flush=True)
        return found

    with ThreadPoolExecutor(options.workers) as pool:
        results = list(pool.map(one, types))
    print(counts(results))
    if options.report:
        path = options.output or ROOT / "docs" / "models.md"
        write_report(path, with_other_rows(path, results) if options.types else results)
        print(f"wrote {path}")
    return int(any(result["result"] in ("wrong", "crash") or result.get("bf16", {}).get("result") in BAD_BF16 for result in results))


if __name__ == "__main__":
    sys.exit(main())
