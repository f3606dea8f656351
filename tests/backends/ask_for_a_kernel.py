"""`python -m tests.backends.ask_for_a_kernel`: asks twice for one kernel, and prints how often processes were asked and what failed."""

from __future__ import annotations

import json
from typing import Any

import torch
from triton.runtime import driver

from paged_attn.backends.compiling import compile_ahead
from paged_attn.backends.compiling.compile_job import CompilingDriver
from paged_attn.backends.sampling.greedy_kernel import best_of_row
from tests.backends.gpus import named


def main() -> None:
    driver.set_active(CompilingDriver(named().target))  # type: ignore[arg-type]
    asked: list[Any] = []
    ask = compile_ahead._workers.compile
    compile_ahead._workers.compile = lambda jobs: (asked.extend(jobs), ask(jobs))[1]  # type: ignore[method-assign]
    keys, tokens = (torch.empty(4, dtype=torch.int64) for _ in range(2))
    for _ in range(2):
        with compile_ahead.compiling_ahead(torch.device("cpu")):
            compile_ahead.launch(best_of_row, (1,), keys, tokens, 4, PARTS=4, EARLY=False)
    print(json.dumps({"asked": len(asked), "failed": [str(error) for _, each in asked if (error := each.exception(60))]}))


if __name__ == "__main__":
    main()
