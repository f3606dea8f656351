"""`paged-attn doctor`: versions, optional packages, and a smoke test; status 0 only if what is needed works."""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from paged_attn.cli.demo import embedded_model
from paged_attn.cli.options import add_common


@dataclass(frozen=True)
class Finding:
    """One line. `works` is None for what is optional and absent: no failure."""

    name: str
    works: bool | None
    detail: str

    def line(self) -> str:
        return f"{ {True: 'ok', False: 'FAIL', None: '-'}[self.works]:<5} {self.name:<16} {self.detail}"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="check this installation", description=__doc__, allow_abbrev=False)
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    findings = [
        _python(),
        _required("torch"),
        _required("transformers"),
        *_gpus(),
        _entry_point(),
        _embedded(),
        *_optional(),
        _smoke_test(),
    ]
    for finding in findings:
        print(finding.line())
    failed = [finding.name for finding in findings if finding.works is False]
    print(f"\nnot working: {', '.join(failed)}" if failed else "\neverything that is needed works")
    return 1 if failed else 0


def _python() -> Finding:
    return Finding("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _required(name: str) -> Finding:
    try:
        return Finding(name, True, version(name))
    except PackageNotFoundError:
        return Finding(name, False, f"not installed: pip install {name}")


def _gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = f"PyTorch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "PyTorch is built without CUDA"
        return [Finding("GPU", None, f"none visible; {built}")]
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        Finding(f"GPU {i}", True, f"{p.name}, SM{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
        for i, p in enumerate(found)
    ]


def _entry_point() -> Finding:
    names = {entry.name for entry in entry_points(group="torch_dynamo_backends")}
    if "paged_attn" in names:
        return Finding("torch.compile", True, 'finds backend="paged_attn" through its entry point')
    return Finding(
        "torch.compile", False, 'no entry point "paged_attn" in torch_dynamo_backends: install the package (pip install -e . in a checkout)'
    )


def _embedded() -> Finding:
    folder = embedded_model()
    return (
        Finding("embedded model", True, str(folder))
        if folder
        else Finding("embedded model", None, "not in this installation; no `paged-attn demo`")
    )


def _optional() -> list[Finding]:
    from paged_attn.backends.packages import PACKAGES

    return [
        Finding(p.module, True, f"{found}: {p.gives}")
        if (found := p.version)
        else Finding(p.module, None, f"not installed; {p.gives}: {p.install}")
        for p in PACKAGES
    ]


def _smoke_test() -> Finding:
    started = time.perf_counter()
    error = op_error()
    words = f"the op on the CPU: torch_native and reference differ by {error:.1e}, in {time.perf_counter() - started:.2f} s"
    return Finding("smoke test", error < 1e-5, words)


def op_error() -> float:
    """Largest difference between two backends on a ragged batch of three requests (a prompt, a chunk and a decode row) through the op."""
    import torch

    from paged_attn.attn_ops.batch import Batch, BatchRequest
    from paged_attn.attn_ops.kv_pool import KVPool
    from paged_attn.attn_ops.op import UNIFIED_ATTENTION
    from paged_attn.attn_ops.spec import AttentionSpec
    from paged_attn.forward import forward_context

    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, qk_head_dim=8, v_head_dim=8, scale=8**-0.5, sliding_window=5)
    requests = [BatchRequest([0] * 7, [5, 2]), BatchRequest([0] * 3, [4, 1, 6], num_cached=6), BatchRequest([0], [3], num_cached=3)]
    batch = Batch.build(requests, page_size=4)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(batch.num_rows, heads, 8, generator=draw) for heads in (4, 2, 2))
    stored = torch.randn(7 * 4 * 2 * 16, generator=draw)
    outputs = []
    for name in ("torch_native", "reference"):
        pool, output = KVPool([spec], 7, 4, torch.float32), torch.empty(batch.num_rows, 4, 8)
        pool.storage.copy_(stored)
        with torch.no_grad(), forward_context(batch, pool, name):
            UNIFIED_ATTENTION(query, key, value, output, 0, True)
        outputs.append(output)
    return float((outputs[0] - outputs[1]).abs().max())
