"""What Inductor compiles for early starts: every kernel waits first, and chains of such kernels read what the ones before them wrote."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache, run_and_get_code

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.linears.linear import LINEAR, ONE_ROW_KERNEL
from paged_attn.attn_ops.triton_launchers import writes_launchers
from paged_attn.capture.inductor.launchers import building_launchers
from paged_attn.capture.inductor.pdl import pdl, waiting_first
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build

pytestmark = pytest.mark.usefixtures("full_float32")
if torch.cuda.is_available():
    from paged_attn.backends.linear.gemv import one_row_linear

    ONE_ROW_KERNEL.use(one_row_linear)


def chain(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Norms, products of one row that ask for their weights early, and buffers that are used again, some by kernels that read nothing."""
    for weight in weights:
        h = F.rms_norm(x.float(), x.shape[-1:]).to(x.dtype)
        wide = torch.cumsum(h.expand(64, -1), 0)  # longer than what follows
        x = x + LINEAR(h + 0 * wide[-1:], weight, None)
        steps = torch.arange(x.shape[-1], device=x.device)
        x = torch.where(LINEAR(x, weight, None) + 0 * wide[-1:] > steps, x.tanh(), x)
    return x


def test_every_kernel_waits_first_and_none_overtakes() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 45 for _ in range(6)]
    x = torch.zeros(1, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), fresh_cache(), pdl(True), waiting_first():
        compiled = torch.compile(chain, dynamic=False)
        _, sources = run_and_get_code(compiled, x, weights)
    bodies = re.findall(r"\ndef triton_\w+\([^\n]*\):\n(.*?)\n'''", "\n".join(sources), re.S)
    assert len(bodies) >= 3
    for body in bodies:
        wait, launch = body.find("gdc_wait"), body.find("gdc_launch_dependents")
        accesses = [at for at in (body.find("tl.load"), body.find("tl.store")) if at >= 0]
        assert 0 <= wait < launch < min(accesses) and body.count("gdc_") == 2, body
    assert "'launch_pdl': True" in sources[0]

    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x, weights)
        for seed in range(60):
            torch.manual_seed(seed)
            x.copy_(torch.randn(1, 2048))
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            once = out.clone()
            torch.cuda.synchronize()
            expected = compiled(x, weights)
            assert torch.equal(once, expected), seed
            assert torch.allclose(once.float(), chain(x, weights).float(), atol=0.1, rtol=0.1), seed


@pytest.mark.parametrize("settings", [{}, {"pdl": False}], ids=["early", "late"])
def test_engines_give_the_models_tokens(settings: dict[str, Any]) -> None:
    model = build("llama", num_hidden_layers=3).cuda()
    prompts = random_prompts((3, 17, 40, 1))
    expected = [greedy(model, prompt, 20) for prompt in prompts]
    with LLM(model, max_batch_tokens=32, max_requests=8, num_pages=64, graph_strict=True, **settings) as llm:
        assert [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=20))] == expected
        assert [c.token_ids for c in llm.generate(prompts[1:2], SamplingParams(max_new_tokens=20))] == expected[1:2]


@pytest.mark.parametrize("elsewhere", [True, False])
def test_launchers_are_built_by_inductors_processes(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import build as building

    if not writes_launchers():
        pytest.skip("this Triton has no launchers built in C")
    built, real = [], building._build
    monkeypatch.setattr(building, "_build", lambda *arguments, **keywords: (built.append(arguments), real(*arguments, **keywords))[1])
    AsyncCompile.use_process_pool()
    AsyncCompile.wait_pool_ready()
    x = torch.ones(64, 512, device="cuda")
    hook = building_launchers() if elsewhere else contextlib.nullcontext()
    with torch.no_grad(), fresh_cache(), pdl(True), waiting_first(), hook:
        torch._dynamo.reset()
        assert torch.allclose(torch.compile(lambda x: F.rms_norm(x, x.shape[-1:]) + 1, dynamic=False)(x), torch.full_like(x, 2))
    assert bool(built) != elsewhere
