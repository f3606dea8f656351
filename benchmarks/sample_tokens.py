"""Microseconds to draw a token for each row of logits: our kernels, and PyTorch's sort, softmax and running sum; and the same of
log-probabilities, penalties and the masks of guides.

python benchmarks/sample_tokens.py [--rows 1 8 32 128 256] [--vocabulary 128256] [--out FILE]

On the GPU alone: each way is captured in a CUDA graph and replayed. `host` is what a call takes that is not captured, without waiting for
the GPU. Logits are random bfloat16 numbers: as flat as a model's with random weights, which leaves top-p most to do.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_attn.backends.sampling import edits, logprobs, sample
from paged_attn.backends.sampling.sampling_tensors import IN_PROMPT, SamplingTensors
from paged_attn.engine.sampling.sample_tokens import sample_with_torch
from paged_attn.engine.sampling.sampler import greedy_sample
from paged_attn.engine.sampling.sampler_output import scored_plainly
from paged_attn.engine.sampling.structured.guides import forbid_plainly
from paged_attn.engine.sampling.token_counts import penalised

SETTINGS: dict[str, dict[str, float]] = {
    "temperature": {},
    "min-p": {"min_p": 0.05},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
}


def rows_of(rows: int, vocabulary: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingTensors:
    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    return SamplingTensors(
        torch.arange(rows, device="cuda"),
        full(0.8, torch.float32),
        torch.rand(rows, dtype=torch.float64, device="cuda"),
        full(min_p, torch.float32) if min_p else None,
        full(vocabulary - top_k, torch.int64) if top_k else None,
        full(1.0 - top_p, torch.float64) if top_p < 1.0 else None,
        0 if top_k or top_p < 1.0 else rows,
    )


def others_of(logits: Tensor, tokens: Tensor) -> dict[str, dict[str, Callable[[], object]]]:
    """What else is done with all rows, and two ways to do it."""
    rows, (count, vocabulary) = torch.arange(len(logits), device="cuda"), logits.shape
    scores, masks = logits.float(), torch.randint(0, 2**31, (count, -(-vocabulary // 32)), device="cuda").int()
    counts = torch.zeros(count, vocabulary, dtype=torch.int32, device="cuda")
    counts[:, :500] = IN_PROMPT + 1
    repetition, frequency, presence = (torch.full((count,), value, device="cuda") for value in (1.1, 0.1, 0.5))
    penalties = (repetition, frequency, presence)

    def penalise_plainly() -> Tensor:
        some, counted = scores.index_select(0, rows), counts.index_select(0, rows)
        return scores.index_copy_(0, rows, penalised(some, counted, *penalties))

    return {
        "5 log-probabilities": {
            "kernels": lambda: logprobs.score_rows(logits, rows, tokens, 5), "pytorch": lambda: scored_plainly(logits, rows, tokens, 5),
        },
        "20 log-probabilities": {
            "kernels": lambda: logprobs.score_rows(logits, rows, tokens, 20), "pytorch": lambda: scored_plainly(logits, rows, tokens, 20),
        },
        "penalties": {
            "kernels": lambda: edits.penalise(scores, rows, counts, rows, penalties), "pytorch": penalise_plainly,
        },
        "mask of a guide": {
            "kernels": lambda: edits.forbid(scores, rows, masks), "pytorch": lambda: forbid_plainly(scores, rows, masks),
        },
    }  # fmt: skip


def device_us(call: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats * 1e3


def host_us(call: Callable[[], object], repeats: int = 20) -> float:
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    taken = time.perf_counter() - started
    torch.cuda.synchronize()
    return taken / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: list[dict[str, Any]] = []
    for rows in args.rows:
        logits = (torch.randn(rows, args.vocabulary, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * 2).bfloat16()
        best = greedy_sample(logits)
        for name, settings in SETTINGS.items():
            of = rows_of(rows, args.vocabulary, **settings)  # type: ignore[arg-type]
            row: dict[str, Any] = {"rows": rows, "settings": name}
            ways = {"kernels": sample.sample_tokens, "pytorch": lambda logits, _, of: sample_with_torch(logits, of)}
            tokens = {way: draw(logits, best, of) for way, draw in ways.items()}
            row["alike"] = (tokens["kernels"] == tokens["pytorch"]).float().mean().item()
            for way, draw in ways.items():
                call = partial(draw, logits, best, of)
                row[f"{way}_us"], row[f"{way}_host_us"] = round(device_us(call), 1), round(host_us(call), 1)
            result.append(row)
            print(json.dumps(row), flush=True)
        for name, both in others_of(logits, best).items():
            row = {"rows": rows, "settings": name}
            row |= {f"{way}_us": round(device_us(call), 1) for way, call in both.items()}
            result.append(row | {f"{way}_host_us": round(host_us(call), 1) for way, call in both.items()})
            print(json.dumps(result[-1]), flush=True)
    if args.out is not None:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "vocabulary": args.vocabulary}
        args.out.write_text(json.dumps({**about, "rows": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
