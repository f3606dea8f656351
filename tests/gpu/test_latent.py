"""Latent attention on a GPU, by name: the model's own formula at published sizes, replayed graphs, and a tiny DeepSeek's own tokens.

Ours takes all sizes; kernels of other packages take the rows of 512 + 64, each in its phases and page sizes. Backends that compile for long
on first use carry the marker `jit`.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, ForwardMode
from paged_attn.attn_ops.batch.step_buffers import StepBuffers, StepShape
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.ops.latent import LATENT_ATTENTION
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.capabilities import PHASES, Feature, Problem
from paged_attn.backends.attention.latent import step
from paged_attn.backends.attention.latent.paged import PagedExpansion
from paged_attn.backends.devices import architecture_of, device_word
from paged_attn.backends.selection.registry import backend_class
from tests.backends.fitting import JIT, instance, reasons_against, usable_names
from tests.backends.latent_problems import LAYER, PUBLISHED, Case, make, spec_of
from tests.gpu.test_graph_contract import on_gpu
from tests.gpu.test_no_sync import waiting_is_an_error
from tests.oracle import greedy, random_prompts
from tests.teacher_forced import by_engine, by_model
from tests.tiny_models import build

STEPS = {
    "decode": ((70, 1), (15, 1), (16, 1), (900, 1)),
    "long": ((3000, 1),),
    "short extensions": ((70, 4), (300, 7), (0, 3)),
    "mixed": ((17, 1), (0, 1), (6, 5), (700, 1), (0, 90)),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
OTHERS = [
    name for name in usable_names("cuda")
    if Feature.MLA in backend_class(name).capabilities.features and name not in ("triton", "torch_native")
]  # fmt: skip
NAMES = [pytest.param(name, marks=[pytest.mark.jit] * (name in JIT)) for name in OTHERS] or [
    pytest.param("none", marks=pytest.mark.skip(reason="no other package for latents is installed"))
]
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)


@pytest.fixture
def absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "expands", lambda *_: False)


def check(case: Case, deterministic: bool = False) -> None:
    case.to("cuda").assert_right(instance("triton", deterministic=deterministic), TOLERANCE[case.query.dtype])


@pytest.mark.usefixtures("absorbed", "full_float32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", STEPS)
@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_sizes(kind: str, lengths: str, dtype: torch.dtype) -> None:
    check(make(spec_of(kind, 16, PUBLISHED), STEPS[lengths], 16, dtype))


@pytest.mark.usefixtures("absorbed")
@pytest.mark.parametrize("heads", [16, 20, 32, 40, 64, 128])
@pytest.mark.parametrize("lengths", STEPS)
def test_heads(heads: int, lengths: str) -> None:
    check(make(spec_of("512 + 64", heads, PUBLISHED), STEPS[lengths], 64, torch.bfloat16))


@pytest.mark.usefixtures("absorbed")
@pytest.mark.parametrize("page_size", [1, 3, 64, 256])
def test_page_sizes(page_size: int) -> None:
    check(make(spec_of("512 + 64", 16, PUBLISHED), STEPS["mixed"], page_size, torch.bfloat16))


@pytest.mark.parametrize("kind", ["512 + 64", "256 + 64", "128 + 32"])
@pytest.mark.parametrize(("heads", "page_size"), [(16, 64), (128, 64), (20, 3), (128, 16)])
@pytest.mark.parametrize("lengths", STEPS)
def test_log_sum_exps(lengths: str, heads: int, page_size: int, kind: str) -> None:
    """And rows before W_UV, of queries that lie apart."""
    case = make(spec_of(kind, heads, PUBLISHED), STEPS[lengths], page_size, torch.bfloat16).to("cuda")
    spec, batch, backend = case.spec, case.batch, instance("triton")
    query = torch.randn(batch.num_rows, heads, 2 * spec.qk_head_dim, dtype=torch.bfloat16, device="cuda")[..., : spec.qk_head_dim]
    output, lse = query.new_empty(batch.num_rows, heads, spec.rank), torch.empty(batch.num_rows, heads, device="cuda")
    plan = backend.plan(batch, case.pool)
    backend.plan_in_graph(plan)
    key = case.rows[:, None]
    backend.forward(plan, LAYER, spec, query, key, key[..., : spec.rank], output, save_kv_cache=True, lse_out=lse)
    first = 0
    for request, (length, new) in enumerate(zip(batch.seq_lens_host, batch.query_lens_host, strict=True)):
        pages = batch.page_table[request, : -(-length // page_size)].long()
        rows = case.pool.key(LAYER)[pages].flatten(0, 1)[:length, 0].float()
        scores = torch.einsum("qhd,kd->hqk", query[first : first + new].float(), rows) * spec.scale
        hidden = torch.arange(length, device="cuda") > torch.arange(length - new, length, device="cuda")[:, None]
        scores.masked_fill_(hidden, float("-inf"))
        expected = torch.einsum("hqk,kd->qhd", scores.softmax(-1), rows[:, : spec.rank])
        error = (output[first : first + new].float() - expected).abs().max() / expected.abs().max()
        assert error <= 2e-2
        torch.testing.assert_close(lse[first : first + new], scores.logsumexp(-1).T, atol=2e-2, rtol=1e-2)
        first += new


def one_that_fits(name: str, lengths: str, page_size: int = 64, heads: int = 16, dtype: torch.dtype = torch.bfloat16) -> Case:
    """A step over a pool of such rows alone, or a skip with the backend's own reasons."""
    spec, cuda = spec_of("512 + 64", heads, PUBLISHED), torch.device("cuda")
    case = make(spec, STEPS[lengths], page_size, dtype, beside=spec)
    phase = frozenset({"decode" if case.batch.mode is ForwardMode.DECODE else "extend"})
    asked = Problem(spec, dtype, dtype, page_size, device_word(cuda), architecture_of(cuda), phases=phase)
    if reasons := reasons_against(name, asked):
        pytest.skip("; ".join(reasons))
    return case.to("cuda")


@pytest.mark.usefixtures("absorbed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("lengths", STEPS)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_of_other_packages(name: str, lengths: str, page_size: int, dtype: torch.dtype) -> None:
    one_that_fits(name, lengths, page_size, dtype=dtype).assert_right(instance(name), TOLERANCE[dtype])


@pytest.mark.usefixtures("absorbed")
@pytest.mark.parametrize("heads", [1, 4, 20, 40, 128])
@pytest.mark.parametrize("lengths", STEPS)
@pytest.mark.parametrize("name", NAMES)
def test_heads_of_other_packages(name: str, lengths: str, heads: int) -> None:
    one_that_fits(name, lengths, heads=heads).assert_right(instance(name), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_another_package_never_waits(name: str) -> None:
    """After a first one, which compiles."""
    case = one_that_fits(name, "decode")
    for _ in range(2):
        case.run(instance(name))
    with waiting_is_an_error():
        case.run(instance(name))


@pytest.mark.parametrize("graphs", ["off", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_an_engine_by_another_package(name: str, graphs: str) -> None:
    """A tiny model of rows of 512 + 64 in bfloat16, prompts in chunks and decode steps, against itself in float32."""
    one_that_fits(name, "decode")
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "qk_nope_head_dim": 64, "v_head_dim": 64, "head_dim": 64}
    sizes = heads | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "first_k_dense_replace": 3}  # no experts, which near ties would change
    model = build("deepseek_v3", dtype=torch.bfloat16, **sizes).cuda()
    prompts = random_prompts((5, 40, 90, 130))
    expected = by_model(copy.deepcopy(model).float(), prompts, 4)
    both = name if backend_class(name).capabilities.phases == PHASES else f"triton,{name}"
    with LLM(model, backend=both, graphs=graphs, page_size=64, num_pages=32, inductor=False) as llm:
        assert all(isinstance(spec, LatentSpec) for spec in llm.engine.runner.layers)
        assert llm.engine.step_runner.graphs is None or llm.engine.step_runner.report().full
        found = by_engine(llm.engine, prompts, 4)
    for got, true in zip(found, expected, strict=True):
        assert (got - true).abs().max() <= 0.08 * true.abs().max()


@pytest.mark.parametrize("lengths", STEPS)
def test_deterministic_cuts(lengths: str) -> None:
    check(make(spec_of("512 + 64", 16, PUBLISHED), STEPS[lengths], 16, torch.bfloat16), deterministic=True)


def test_a_dealt_out_step() -> None:
    """As the engine runs it: prompts are expanded, decoding requests are not."""
    check(make(spec_of("512 + 64", 16, PUBLISHED), ((17, 1), (0, 300), (700, 1), (400, 3)), 16, torch.bfloat16))


@pytest.mark.parametrize("kind", ["512 + 64", "256 + 64", "128 + 32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prompts_come_to_the_kernel_for_hopper(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype) -> None:
    """New prompts and one that goes on, between decoding requests, with contexts for both of its blocks."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setattr(step, "expands", lambda spec, new, cached: new > 3)
    tilings = []
    made = step.paged_expansions

    def seen(*args: Any) -> tuple[PagedExpansion, ...]:
        found = made(*args)
        assert all(isinstance(each, PagedExpansion) for each in found)
        tilings.extend(share.kind.tiling for expansion in found for share in expansion.plan.shares)
        return found

    monkeypatch.setattr(step, "paged_expansions", seen)
    for longest, keys in ((900, 64), (2500, 128)):
        lengths = ((17, 1), (0, 300), (0, 1), (longest - 200, 200), (700, 1), (0, 1300), (400, 3))
        check(make(spec_of(kind, 16, PUBLISHED), lengths, 16, dtype))
        assert [(tiling.hopper, tiling.block_n) for tiling in tilings] == [(True, keys)]
        tilings.clear()


@pytest.mark.parametrize("heads", [16, 128])
def test_contexts_that_are_expanded_in_parts(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """A new prompt, and one that goes on, whose parts hold old tokens, new ones or both; joined by log-sum-exps."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setattr(step, "expands", lambda spec, new, cached: new > 3)
    monkeypatch.setattr(step, "most_tokens", lambda call: 500)
    for way in ("attend_expanded", "FreshPrompts"):
        monkeypatch.setattr(step, way, lambda *_: pytest.fail("not by the kernel"))
    check(make(spec_of("512 + 64", heads, PUBLISHED), ((17, 1), (0, 1400), (800, 900), (0, 300)), 16, torch.bfloat16))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("name", "page_size"), [("triton", 16), *(pytest.param(*p.values, 64, marks=p.marks) for p in NAMES)])
def test_a_graph_replays_other_steps(name: str, page_size: int, heads: int) -> None:
    """Of four decode requests, in fixed buffers, planned at the longest context; it never waits for the device."""
    one_that_fits(name, "decode", page_size, heads)
    spec, device = spec_of("512 + 64", heads, PUBLISHED), torch.device("cuda")
    longest = 1000
    width = -(-longest // page_size)
    backend = instance(name).for_graph(4, 4 * width)
    pool = make(spec, ((longest - 1, 1),) * 4, page_size, torch.bfloat16, beside=spec).to(device).pool
    buffers = StepBuffers(4, 4, 4, width, device)
    shape = StepShape(4, 4, 4)
    query, rows = (torch.zeros(4, *each, dtype=torch.bfloat16, device=device) for each in ((heads, 192), (576,)))
    output, weight = query.new_empty((4, heads, 128)), query.new_zeros((heads * 256, 512))
    fixed = Batch.build([], page_size, device, shape, buffers)
    plan = backend.plan(replace(fixed, seq_lens_host=backend.graph_lengths(4, longest, pool) * 4), pool)

    def forward() -> None:
        backend.plan_in_graph(plan)
        with ForwardContext(plan.batch, pool, backend, plan=plan):
            LATENT_ATTENTION(query, rows[:, :512], rows[:, 512:], weight, weight, output, LAYER)

    replay = on_gpu(forward)
    for cached in ((900, 63, 64, 15), (1,), (7, 800), (30, 31, 670)):
        case = make(spec, tuple((each, 1) for each in cached), page_size, torch.bfloat16, padding=0, beside=spec)
        pool.storage.fill_(float("nan"))[: case.pool.storage.numel()].copy_(case.pool.storage)
        table, count = case.batch.page_table_host, len(cached)
        assert table is not None
        for fixed_rows, new in ((query, case.query), (rows, case.rows)):
            fixed_rows.fill_(float("nan"))[:count].copy_(new[:count])
        weight.copy_(case.weight)
        with waiting_is_an_error():
            requests = [BatchRequest([1], table[r, : each // page_size + 1].tolist(), each) for r, each in enumerate(cached)]
            backend.refresh(plan, Batch.build(requests, page_size, device, shape, buffers))
            replay()
        error = (output[:count].double().cpu() - case.expected).abs().max() / case.expected.abs().max()
        assert error <= 2e-2


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("graphs", ["off", "full"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_tokens_are_the_models_own(graphs: str, page_size: int) -> None:
    model, prompts = build("deepseek_v3").cuda(), random_prompts((1, 5, 17, 33, 70))
    expected = [greedy(model, prompt, 16) for prompt in prompts]
    settings = {"page_size": page_size, "max_batch_tokens": 24, "max_requests": 5, "num_pages": 96, "inductor": False}
    with LLM(model, backend="triton", graphs=graphs, **settings) as llm:
        assert all(isinstance(spec, LatentSpec) for spec in llm.engine.runner.layers)
        llm.engine.pool.storage[1:].fill_(float("nan"))
        for _ in ("cold", "warm"):
            assert [done.token_ids for done in llm.generate(prompts, GREEDY)] == expected


@pytest.mark.usefixtures("full_float32")
def test_auto_keeps_one_row_per_token() -> None:
    model, prompts = build("deepseek_v3").cuda(), random_prompts((5, 17, 33))
    expected = [greedy(model, prompt, 16) for prompt in prompts]
    with LLM(model, page_size=16, num_pages=96, inductor=False) as llm:
        assert all(isinstance(spec, LatentSpec) for spec in llm.engine.runner.layers)
        assert [done.token_ids for done in llm.generate(prompts, GREEDY)] == expected
