"""Host time of a decode step: scheduling, laying out the batch, choosing and taking in tokens, with a model that computes nothing.

The steps overlap as on a GPU, and lie in the buffers of captured graphs; on a GPU one copy to it is added. Writes JSON.

python benchmarks/host_time.py [--requests 1 32 128 256] [--prompt 512] [--text] [--out F]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import time
from importlib.resources import files
from pathlib import Path

import torch
import transformers

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.batch.batch import Batch, RequestColumns
from paged_attn.attn_ops.batch.step_buffers import StepBuffers, StepShape
from paged_attn.engine.engine import Engine
from paged_attn.engine.steps.step_runner import Step, StepOutput

PAGE_SIZE = 16


def without_model(engine: Engine, requests: int, rows: int, pages: int) -> None:
    """Let steps be laid out as for captured graphs, and give every request token 65."""
    buffers = StepBuffers(rows, max(requests, 2), max(requests, 2), pages, engine.runner.device)
    logits, tokens = torch.zeros(rows, 8, device=engine.runner.device), torch.full((rows,), 65, device=engine.runner.device)
    size = max(requests, 2)

    def prepare(columns: RequestColumns) -> Step:
        shape = StepShape(size, size, size) if columns.all_decode else None
        batch = Batch.build(columns, PAGE_SIZE, engine.runner.device, shape, buffers if shape else None)
        return Step(batch, None, int(columns.num_logits.sum()))

    engine.step_runner.prepare = prepare  # type: ignore[method-assign,assignment]
    engine.step_runner.run = lambda step: StepOutput(logits[: step.num_logits], tokens[: step.num_logits])  # type: ignore[method-assign]


def measure(requests: int, prompt: int, steps: int, text: bool) -> list[float]:
    """Microseconds of each step in which all requests decode."""
    pages = -(-(prompt + steps + 200) // PAGE_SIZE)
    tokens = requests * prompt
    llm = LLM(
        files("paged_attn.demo_model"), num_pages=requests * pages + 1, page_size=PAGE_SIZE, max_batch_tokens=8192, max_requests=requests,
        overlap=True, graphs="off", backend="torch_native", layer_groups=False,
    )  # fmt: skip
    engine, rng = llm.engine, random.Random(0)
    engine.input_processor.limits = type(engine.limits)(None, None, frozenset())  # the demo model knows fewer positions
    without_model(engine, requests, max(tokens, 8192), pages)
    for _ in range(requests):
        ids = [rng.randrange(200) for _ in range(prompt)]
        engine.add_request(ids, SamplingParams(max_new_tokens=steps + 100, ignore_eos=True), text_at_end=not text)
    while not all(request.num_sampled for request in engine.requests.values()):
        engine.step()
    for _ in range(10):
        engine.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started) * 1e6)
    llm.close()
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--text", action="store_true", help="decode each token's text at once, as a stream needs it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for count in args.requests:
        times = measure(count, args.prompt, args.steps, args.text)
        row = {"requests": count, "median_us": statistics.median(times), "least_us": times[0], "p99_us": times[len(times) * 99 // 100]}
        print(f"{count:4} requests: median {row['median_us']:.0f} us, least {row['least_us']:.0f}, 99th of 100 {row['p99_us']:.0f}")
        rows.append(row)
    if args.out:
        record = {
            "date": datetime.date.today().isoformat(), "machine": platform.processor() or platform.machine(), "torch": torch.__version__,
            "transformers": transformers.__version__, "prompt": args.prompt, "text": args.text, "rows": rows,
        }  # fmt: skip
        args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
