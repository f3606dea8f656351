"""An engine whose steps are recorded (on a tape, in place of CUDA graphs): the unmodified model's tokens, budgets, refusals, checks."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

from paged_attn import LLM, SamplingParams, explain
from paged_attn.attn_ops.batch.batch import BatchRequest
from paged_attn.attn_ops.errors import CaptureError, UnsupportedError
from paged_attn.backends.selection.select import select_for_pool
from paged_attn.capture.graphs.graph_set import GraphKey
from paged_attn.engine import build_runtime
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.engine import Engine
from paged_attn.engine.sampling import sampler
from paged_attn.engine.steps.capture_specs import CaptureSpecs
from paged_attn.engine.steps.future_tokens import FutureTokens
from tests.capture.fixed_backend import SHORT, FixedBackend
from tests.capture.tape import Tape, TapeRecorder
from tests.engine.models import assert_idle, one_capture, oracle, random_prompts, run_all, tiny
from tests.oracle import greedy
from tests.recurrent_models import recurrent
from tests.tiny_models import build

GREEDY = SamplingParams(max_new_tokens=12)
PROMPTS = random_prompts(5, 1, 2, 3, 5, 17, 33, 30, 9, 4)


@contextlib.contextmanager
def fixed_backend():
    """Every engine made inside decodes with a backend that can be recorded."""
    made: list[FixedBackend] = []

    def select(name: str, pool: Any, dtype: Any, **_: Any) -> Any:
        made.append(FixedBackend())
        return dataclasses.replace(select_for_pool("torch_native", pool, dtype), backend=made[-1])

    with mock.patch.object(build_runtime, "select_for_pool", select):
        yield made


def captured_engine(model: Any = None, recorder: TapeRecorder | None = None, fixed: bool = True, **settings: Any) -> Engine:
    config = EngineConfig(**{
        "page_size": 4, "num_pages": 128, "max_requests": 6, "max_batch_tokens": 24, "graph_decode_sizes": 3, "graph_extend_sizes": 3,
        **settings,
    })  # fmt: skip
    model, recorder = model or tiny(), recorder or TapeRecorder()
    with fixed_backend() if fixed else contextlib.nullcontext(), one_capture() if config.compile else contextlib.nullcontext():
        return Engine(model, config=config, recorder=recorder)


def tokens_of(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    run_all(engine)
    return [request.output_token_ids for request in requests]


def modes_of(engine: Engine) -> list[str]:
    """The mode of each step from now on."""
    modes: list[str] = []
    run = engine.step_runner.run

    def spied(step: Any) -> Any:
        modes.append(step.captured.key.mode if step.captured else "uncaptured")
        return run(step)

    engine.step_runner.run = spied  # type: ignore[method-assign]
    return modes


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "gpt2", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("compiled", [True, False])
def test_tokens_are_the_models_own_with_full_graphs_and_pieces(name: str, compiled: bool) -> None:
    """More requests than the largest graph holds, in chunks, with shared prefixes, twice."""
    model = build(name, tie_word_embeddings=False)
    engine = captured_engine(model, compile=compiled, graph_verify=name == "qwen3")
    modes = modes_of(engine)
    for _ in range(2):  # the second time with a warm prefix cache
        assert tokens_of(engine) == [oracle(prompt, model=model) for prompt in PROMPTS]
    assert set(modes) == {"full", "piecewise"}
    engine.close()


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_tokens_are_the_models_own_if_a_kernel_brings_the_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched before the tokens they begin with are known, which are in place before a graph begins."""
    pytest.importorskip("triton")
    from paged_attn.backends.host_memory.fetch import FetchKernel

    monkeypatch.setattr(FutureTokens, "fetch", lambda future: FetchKernel(future.tokens))
    monkeypatch.setattr(FutureTokens, "resolve", None)  # not called, also where steps are recorded
    model = build(name, tie_word_embeddings=False)
    engine = captured_engine(model, overlap=True)
    modes = modes_of(engine)
    assert tokens_of(engine) == [oracle(prompt, model=model) for prompt in PROMPTS]
    assert set(modes) == {"full", "piecewise"}


def test_sampled_tokens_replace_the_most_likely_ones_where_the_next_step_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside greedy requests, and with log-probabilities of the sampled ones."""
    pytest.importorskip("triton")
    from paged_attn.backends.sampling import sample

    drawn = SamplingParams(max_new_tokens=12, temperature=0.9, top_p=0.9, seed=3, logprobs=1)
    monkeypatch.setattr(sampler, "sample_tokens", sample.sample_tokens)
    calls: list[Any] = []
    found = []
    for in_place in (False, True):
        monkeypatch.setattr(sampler, "sample_in_place", lambda *given: not calls.append(sample.sample_in_place(*given)))
        if not in_place:
            monkeypatch.setattr(sampler, "sample_in_place", lambda *given: False)
        engine = captured_engine(overlap=True)
        requests = [engine.add_request(prompt, drawn if i % 2 else GREEDY) for i, prompt in enumerate(PROMPTS[:5])]
        events = run_all(engine)
        found.append(([request.output_token_ids for request in requests], [(e.token_id, e.logprob) for e in events]))
    assert found[0] == found[1] and calls
    assert [tokens == oracle(prompt) for tokens, prompt in zip(found[1][0], PROMPTS, strict=False)] == [True, False] * 2 + [True]


def test_garbage_in_padding_pages_and_buffers_reaches_nobody() -> None:
    engine = captured_engine()
    engine.pool.storage.fill_(float("nan"))
    engine.pool.storage[:1].zero_()
    assert engine.step_runner.buffers is not None
    engine.step_runner.buffers.page_tables[0].fill_(127)
    assert tokens_of(engine) == [oracle(prompt) for prompt in PROMPTS]


def test_a_step_beyond_the_largest_size_runs_uncaptured() -> None:
    engine = captured_engine(max_batch_tokens=24)
    engine.step_runner._pieces.sizes.remove(24)
    modes = modes_of(engine)
    assert tokens_of(engine, [PROMPTS[5]]) == [oracle(PROMPTS[5])]
    assert modes[0] == "uncaptured" and modes[-1] == "full"


def test_no_step_is_captured_of_more_rows_than_all_requests_may_have() -> None:
    engine = captured_engine(max_requests=2, max_batch_tokens=1024)
    assert engine.runner.max_positions == 256 and max(engine.step_runner.graphs.sizes("piecewise")) == 2 * 256  # type: ignore[union-attr]
    assert tokens_of(engine, PROMPTS[:2]) == [oracle(prompt, 12) for prompt in PROMPTS[:2]]


def test_full_graphs_are_replayed_without_a_plan_and_refreshed() -> None:
    engine = captured_engine()
    prompts = [PROMPTS[3], PROMPTS[4]]
    for prompt in prompts:
        engine.add_request(prompt, GREEDY)
    engine.step()
    backend = engine.selection.backend
    assert isinstance(backend, FixedBackend)
    plans = backend.plans
    for _ in range(5):
        engine.step()
    assert backend.plans == plans and backend.refreshed == 5


def test_the_variant_follows_the_lengths() -> None:
    engine = captured_engine()
    assert engine.step_runner.graphs is not None
    assert {key.variant for key in engine.step_runner.graphs.captured if key.mode == "full"} == {0, 1}
    used: list[int] = []
    replay = engine.step_runner._replay
    engine.step_runner._replay = lambda batch, captured: (used.append(captured.key.variant), replay(batch, captured))[1]  # type: ignore[method-assign]
    (tokens,) = tokens_of(engine, [PROMPTS[2]])
    assert tokens == oracle(PROMPTS[2])
    decode = used[1:]
    assert decode == [0] * (SHORT - 3) + [1] * (len(decode) - (SHORT - 3))


def test_a_graph_of_another_variant_is_no_substitute() -> None:
    engine = captured_engine()
    assert engine.step_runner.graphs is not None
    for key in [key for key in engine.step_runner.graphs.captured if key.variant == 1]:
        del engine.step_runner.graphs.captured[key]
    modes = modes_of(engine)
    assert tokens_of(engine, [PROMPTS[2]]) == [oracle(PROMPTS[2])]
    assert modes == ["piecewise"] + ["full"] * (SHORT - 3) + ["piecewise"] * (len(modes) - 1 - (SHORT - 3))


def test_a_prompts_attention_is_planned_behind_the_first_piece_and_a_decode_steps_before() -> None:
    order, replay = list[str](), Tape.replay
    with mock.patch.object(Tape, "replay", lambda tape: (order.append("piece"), replay(tape))[1]):
        engine = captured_engine(fixed=False)
    backend, runner = engine.selection.backend, engine.step_runner
    plan, run = backend.plan, runner.run
    backend.plan = lambda *given: (order.append("plan"), plan(*given))[1]  # type: ignore[method-assign]
    runner.run = lambda step: (order.append(step.batch.mode.value), run(step))[1]  # type: ignore[method-assign]
    assert tokens_of(engine, [PROMPTS[3]]) == [oracle(PROMPTS[3])]
    steps = [order[at : at + 3] for at, what in enumerate(order) if what in ("extend", "decode")]
    assert steps == [["extend", "piece", "plan"], *[["decode", "plan", "piece"]] * 11]


def test_a_backend_that_can_not_be_captured_runs_decode_in_pieces() -> None:
    engine = captured_engine(fixed=False)
    modes = modes_of(engine)
    assert tokens_of(engine) == [oracle(prompt) for prompt in PROMPTS]
    assert set(modes) == {"piecewise"}
    assert "torch_native cannot be captured" in "\n".join(engine.step_runner.report().lines())


def test_recurrent_models_are_not_verified() -> None:
    with pytest.raises(UnsupportedError, match="graph_verify runs every step twice"):
        captured_engine(recurrent("qwen3_next"), graph_verify=True)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2", "mamba"])
def test_ops_on_slots_of_state_are_inside_full_graphs(name: str) -> None:
    """More requests than slots, whose slots change hands; what is in slot 0, and in free ones, reaches nobody."""
    model = recurrent(name)
    engine = captured_engine(model, max_batch_tokens=16, max_requests=3)
    assert engine.state_pool is not None
    engine.state_pool.fill(float("nan"))
    prompts, modes = PROMPTS[:6], modes_of(engine)
    assert tokens_of(engine, prompts) == [greedy(model, prompt, GREEDY.max_new_tokens) for prompt in prompts]
    assert set(modes) == {"full", "piecewise"}
    assert engine.step_runner.graphs is not None
    assert all(not c.segments.num_calls for key, c in engine.step_runner.graphs.captured.items() if key.mode == "full")
    assert_idle(engine)


def test_attention_is_called_between_the_graphs_of_pieces_and_inside_full_ones() -> None:
    engine = captured_engine()
    assert engine.step_runner.graphs is not None
    layers = len(engine.runner.layers)
    for key, captured in engine.step_runner.graphs.captured.items():
        expected = (1, 0) if key.mode == "full" else (layers + 1, layers)
        assert (captured.segments.num_graphs, captured.segments.num_calls) == expected


class TestBudget:
    def test_shapes_are_captured_coarse_to_fine_until_the_budget_is_used(self) -> None:
        layers = 3
        pieces = (layers + 1) * 1000
        settings = {"max_batch_tokens": 256, "graph_extend_sizes": 9}
        everything = captured_engine(**settings).step_runner.graphs
        engine = captured_engine(graph_memory_gib=3.5 * pieces / 2**30, **settings)
        assert engine.step_runner.graphs is not None and everything is not None
        sizes = everything.sizes("piecewise")
        assert len(sizes) == 9
        assert (
            engine.step_runner.graphs.sizes("piecewise") == [sizes[0], sizes[4], sizes[8]]
            and engine.step_runner.graphs.nbytes <= 3.5 * pieces
        )
        assert any("allowed" in reason for reason in engine.step_runner.graphs.refused.values())
        assert tokens_of(engine) == [oracle(prompt) for prompt in PROMPTS]

    def test_nothing_fits(self) -> None:
        engine = captured_engine(graph_memory_gib=0)
        modes = modes_of(engine)
        assert tokens_of(engine) == [oracle(prompt) for prompt in PROMPTS]
        assert set(modes) == {"uncaptured"}

    def test_strict_makes_it_an_error(self) -> None:
        with pytest.raises(CaptureError, match=r"piecewise 24 cannot be captured.*MiB"):
            captured_engine(graph_memory_gib=0, graph_strict=True)


class Workspaces(TapeRecorder):
    """`kept` bytes are taken by what is first recorded whole, and stay."""

    kept = 0

    def bytes_in_use(self) -> int:
        return self.kept + super().bytes_in_use()


def test_what_the_first_graph_takes_once_does_not_count_against_the_budget() -> None:
    recorder, full = Workspaces(), CaptureSpecs.full

    def prepare(specs: CaptureSpecs, key: GraphKey) -> Any:
        recorder.kept = 2**30
        return full(specs, key)

    with mock.patch.object(CaptureSpecs, "full", prepare):
        engine = captured_engine(recorder=recorder, graph_memory_gib=0.5, graph_strict=True)
    graphs = engine.step_runner.graphs
    assert graphs is not None and len(graphs.sizes("full")) == 3 and graphs.nbytes < 2**20
    assert tokens_of(engine, PROMPTS[:3]) == [oracle(prompt) for prompt in PROMPTS[:3]]


class Unrecordable(TapeRecorder):
    """Fails at the end of what embeds rows of one size, as a capture that something has made invalid does."""

    def __init__(self, rows: int):
        super().__init__()
        self.rows, self.invalid = rows, False

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = super().call(function, args, kwargs)
        self.invalid |= function is torch.ops.aten.embedding.default and result.shape[1] == self.rows
        return result

    def end(self) -> Any:
        invalid, self.invalid = self.invalid, False
        if invalid:
            raise RuntimeError("operation not permitted when stream is capturing\nsecond line")
        return super().end()


class TestRefusedShapes:
    def test_a_shape_that_fails_runs_in_the_next_larger_one_and_explain_says_why(self) -> None:
        engine = captured_engine(recorder=Unrecordable(16))
        text = explain(engine)
        assert "no graph     piecewise 16: RuntimeError: operation not permitted when stream is capturing" in text and "second" not in text
        assert tokens_of(engine) == [oracle(prompt) for prompt in PROMPTS]

    def test_strict_names_it(self) -> None:
        with pytest.raises(CaptureError, match="piecewise 16 cannot be captured: RuntimeError: operation not permitted"):
            captured_engine(recorder=Unrecordable(16), graph_strict=True)


class TestSafety:
    def test_a_replaced_parameter_is_named_and_nothing_runs(self) -> None:
        model = build("qwen3", tie_word_embeddings=False)
        engine = captured_engine(model)
        request = engine.add_request(PROMPTS[3], GREEDY)
        engine.step()
        layer = model.model.layers[1].mlp
        before, layer.up_proj.weight = layer.up_proj.weight, torch.nn.Parameter(layer.up_proj.weight.clone())
        with pytest.raises(CaptureError, match=r"model\.layers\.1\.mlp\.up_proj\.weight was replaced"):
            engine.step()
        layer.up_proj.weight = before
        run_all(engine)
        assert request.output_token_ids == oracle(PROMPTS[3], model=model), "the refused step was lost on nobody"

    def test_another_dtype_is_seen(self) -> None:
        model = build("qwen3", tie_word_embeddings=False)
        engine = captured_engine(model)
        engine.add_request(PROMPTS[3], GREEDY)
        model.double()
        with pytest.raises(CaptureError, match="moved to another address"):
            engine.step()

    def test_weights_written_in_place_are_used(self) -> None:
        model, other = build("qwen3", tie_word_embeddings=False), build("qwen3", seed=7, tie_word_embeddings=False)
        engine = captured_engine(model)
        model.load_state_dict(other.state_dict())
        assert tokens_of(engine) == [oracle(prompt, model=other) for prompt in PROMPTS]

    @pytest.mark.parametrize("mode", ["piecewise", "full"])
    def test_verify_sees_a_graph_that_computes_something_else(self, mode: str) -> None:
        engine = captured_engine(graph_verify=True, graphs=mode)
        assert engine.step_runner.graphs is not None and isinstance(engine.step_runner.graphs.recorder, TapeRecorder)
        for key, captured in engine.step_runner.graphs.captured.items():
            if key.mode == mode:  # as if a value that changes from step to step had been recorded as a constant
                captured.segments.output[0].mul_(1)
                steps = (*captured.segments.steps, lambda out=captured.segments.output[0]: out.mul_(1.01))
                replaced = dataclasses.replace(captured, segments=dataclasses.replace(captured.segments, steps=steps))
                engine.step_runner.graphs.captured[key] = replaced
        engine.add_request(PROMPTS[3], GREEDY)
        with pytest.raises(CaptureError, match=f"verify: the graph {mode} .* off by"):
            run_all(engine)

    def test_close_frees_every_graph_and_later_steps_run_uncaptured(self) -> None:
        recorder = TapeRecorder()
        engine = captured_engine(recorder=recorder)
        assert recorder.tapes
        engine.close()
        assert not recorder.tapes and engine.step_runner.graphs is not None and not engine.step_runner.graphs.captured
        assert tokens_of(engine) == [oracle(prompt) for prompt in PROMPTS]
        assert_idle(engine)


def test_explain_shows_a_mode_for_each_phase_and_shape() -> None:
    text = explain(captured_engine())
    assert "decode       full graphs of 2 to 6 (3 sizes) requests" in text
    assert "extend       captured pieces of 16 to 24 (2 sizes) rows, 3 ops between 4 graphs each" in text
    assert "beyond 24 rows: uncaptured, rewritten, eager pieces" in text


def test_explain_of_an_engine_without_capture() -> None:
    text = explain(LLM(tiny(), page_size=4, num_pages=32))
    assert "decode       uncaptured" in text and "capture is off" in text


def test_the_most_likely_tokens_are_chosen_in_the_graphs() -> None:
    engine = captured_engine()
    steps = engine.step_runner
    engine.pool.storage.zero_()
    step = steps.prepare([BatchRequest([5], [1, 2, 3], 9), BatchRequest([7], [4], 2)])
    assert step.captured is not None and step.captured.key.mode == "full"
    logits, best = steps.run(step)
    assert best is not None and best.shape == (2,) and torch.equal(best, logits.argmax(-1))
    assert best.data_ptr() == steps.future_tokens.tokens.data_ptr(), "where the next step reads them"
    without = captured_engine(graph_sampling=False)
    assert without.step_runner.run(without.step_runner.prepare([BatchRequest([5], [1], 2)])).greedy_tokens is None
    assert tokens_of(without) == [oracle(prompt) for prompt in PROMPTS]


class TestOpsThatCanNotBeRecorded:
    class Fails(TapeRecorder):
        def call(self, function: Any, args: Any, kwargs: Any) -> Any:
            if function is torch.ops.aten.silu.default:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().call(function, args, kwargs)

    def test_one_that_returns_tensors_runs_between_the_graphs(self) -> None:
        engine = captured_engine(recorder=self.Fails(), graph_strict=True)
        text = explain(engine)
        assert "between      aten.silu.default: RuntimeError: operation not permitted" in text
        assert "6 ops between 7 graphs" in text and "3 ops between 4 graphs" in text, "pieces, and decode, which has its attention inside"
        assert tokens_of(engine) == [oracle(prompt) for prompt in PROMPTS]

    def test_one_whose_value_python_sees_leaves_the_model_uncaptured(self) -> None:
        model = build("qwen3", tie_word_embeddings=False)
        forward = model.model.norm.forward
        model.model.norm.forward = lambda x: forward(x) * (1 if float(x.sum()) < float("inf") else 2)
        engine = captured_engine(model, compile=False)
        modes = modes_of(engine)
        assert "no graph     piecewise 24: OpNotRecorded: aten._local_scalar_dense.default cannot be recorded" in explain(engine)
        assert tokens_of(engine, PROMPTS[:3]) == [oracle(prompt, model=model) for prompt in PROMPTS[:3]]
        assert set(modes) == {"uncaptured"}
        engine.close()
