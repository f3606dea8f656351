"""torch.compile(model, backend="paged_attn") called like the model itself, and under a forward context."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from paged_attn import Batch, BatchRequest, KVPool, UnsupportedError, attention_layers, forward_context
from paged_attn.attn_ops.errors import ContextError
from paged_attn.dynamo_backend import graphs_of
from tests.covering import every_pair
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build_short


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "shape", "by_keyword"),
    every_pair(["llama", "gemma3_text", "llama4_text", "opt"], [(1, 1), (1, 2), (1, 9), (3, 7), (2, 40)], [False, True]),
)
def test_same_logits_for_any_batch_shape(name: str, shape: tuple[int, int], by_keyword: bool) -> None:
    """Called with ids alone, and as a model without a cache is."""
    model = build_short(name)
    compiled = torch.compile(model, backend="paged_attn")
    ids = torch.randint(2, 96, shape)
    with torch.no_grad():
        found = compiled(input_ids=ids, use_cache=False) if by_keyword else compiled(ids)
        assert torch.equal(found.logits, model(ids).logits)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt2"])
def test_same_logits_with_a_padded_attention_mask(name: str) -> None:
    model = build_short(name)
    compiled = torch.compile(model, backend="paged_attn")
    ids, mask = torch.randint(2, 96, (3, 13)), torch.ones(3, 13, dtype=torch.int64)
    mask[0, :5] = 0
    mask[2, :1] = 0
    with torch.no_grad():
        assert torch.equal(compiled(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("in_place", [False, True])
def test_generate_works_as_before(in_place: bool) -> None:
    model = build_short("gemma3_text")
    ids, mask = torch.randint(2, 96, (2, 11)), torch.ones(2, 11, dtype=torch.int64)
    mask[0, :4] = 0
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    if in_place:
        model.compile(backend="paged_attn")
        got = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        assert graphs_of(model), "generate() did not go through the compiled model"
    else:
        got = torch.compile(model, backend="paged_attn").generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, expected)


def test_found_by_name_without_importing_us() -> None:
    code = (
        "import sys, torch; m = torch.nn.Linear(3, 3); c = torch.compile(m, backend='eager'); c(torch.ones(1, 3));"
        "assert not any(n == 'paged_attn' for n in sys.modules);"
        "from torch._dynamo.backends.registry import list_backends; assert 'paged_attn' in list_backends(), list_backends()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def _serve(compiled: nn.Module, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy decoding of all prompts together, one page per request."""
    layers = attention_layers(compiled)
    pool = KVPool(layers, len(prompts) + 1, 128, torch.float32)
    tokens, cached = [list(p) for p in prompts], [0] * len(prompts)
    with torch.no_grad():
        for _ in range(new_tokens):
            batch = Batch.build([BatchRequest(t[c:], [i + 1], c) for i, (t, c) in enumerate(zip(tokens, cached, strict=True))], 128)
            with forward_context(batch, pool):
                logits = compiled(**batch.model_inputs()).logits[0]
            for i, token in enumerate(logits[batch.logits_rows[: batch.num_logits]].argmax(-1).tolist()):
                cached[i] = len(tokens[i])
                tokens[i].append(token)
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4_text", "deepseek_v3"])
def test_a_paged_batch_gives_the_models_own_tokens(name: str) -> None:
    model, prompts = build_short(name), random_prompts((1, 5, 17, 33))
    assert _serve(torch.compile(model, backend="paged_attn"), prompts, 8) == [greedy(model, p, 8) for p in prompts]


def test_all_lengths_share_one_compile() -> None:
    model = build_short("qwen3")
    compiled = torch.compile(model, backend="paged_attn", fullgraph=True)
    pool = KVPool(attention_layers(compiled), 600, 1, torch.float32)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for count in (1, 2, 7, 33, 200):
            prompt = random_prompts((count,))[0]
            batch = Batch.build([BatchRequest(prompt, range(1, count + 1))], 1)
            with forward_context(batch, pool):
                logits = compiled(**batch.model_inputs()).logits[0]
            expected = model(torch.tensor([prompt])).logits[0]
            assert torch.allclose(logits[:count], expected, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0, "a length was compiled again"
    assert len(graphs_of(compiled)) == 1


def test_a_second_compile_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = build_short("llama")
    compiled = torch.compile(model, backend="paged_attn")
    layers = attention_layers(compiled)
    batch = Batch.build([BatchRequest([5, 6, 7], [1])], 16)
    with torch.no_grad(), forward_context(batch, KVPool(layers, 2, 16, torch.float32)):
        compiled(**batch.model_inputs(), return_dict=False)
        with pytest.raises(UnsupportedError, match=r"logits of 1 rows for 5 tokens"):
            compiled(**batch.model_inputs(), logits_to_keep=1)
    assert "compiled again" in caplog.text


def test_a_second_compile_of_a_call_without_pages_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo compiles one token apart from more; told of pages, users of no page look for what they did wrong."""
    model = build_short("llama")
    compiled = torch.compile(model, backend="paged_attn")
    with torch.no_grad():
        for count in (1, 2):
            ids = torch.full((1, count), 5)
            assert torch.equal(compiled(ids).logits, model(ids).logits)
    assert len(graphs_of(model)) == 2 and "compiled again" not in caplog.text


def test_a_mode_is_refused_with_what_there_is() -> None:
    compiled = torch.compile(build_short("llama"), backend="paged_attn", mode="reduce-overhead")
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match=r"no mode 'reduce-overhead'; leave mode out\. Known options: inductor"
    ):
        compiled(torch.tensor([[2, 3]]))


def test_outside_inputs_and_wrong_inputs_under_a_context() -> None:
    model = build_short("llama")
    compiled = torch.compile(model, backend="paged_attn")
    pool = KVPool(attention_layers(compiled), 8, 16, torch.float32)
    batch = Batch.build([BatchRequest([5, 6, 7], [1]), BatchRequest([8], [2])], 16)
    other = Batch.build([BatchRequest([5, 6], [1])], 16)
    with torch.no_grad(), forward_context(batch, pool):
        with pytest.raises(ContextError, match=r"input_ids has 2 tokens.*batch has 4"):
            compiled(**other.model_inputs())
        with pytest.raises(UnsupportedError, match=r"forward context is active.*attention_mask"):
            compiled(input_ids=batch.input_ids[None], attention_mask=torch.ones(1, 4, dtype=torch.int64), use_cache=False)
        with pytest.raises(UnsupportedError, match=r"forward context is active.*batch size"):
            compiled(input_ids=torch.ones(2, 4, dtype=torch.int64), use_cache=False)
    wrong_layers = KVPool(attention_layers(torch.compile(build_short("mistral"), backend="paged_attn")), 8, 16, torch.float32)
    with torch.no_grad(), forward_context(batch, wrong_layers), pytest.raises(ContextError, match=r"layer 0.*sliding_window"):
        compiled(**batch.model_inputs())
    with torch.no_grad(), forward_context(batch, pool):
        assert compiled(**batch.model_inputs()).logits.shape == (1, 4, 96)


def test_two_threads_run_their_own_batches() -> None:
    model, prompts = build_short("llama"), random_prompts((9, 21))
    compiled = torch.compile(model, backend="paged_attn")
    attention_layers(compiled)
    results: dict[int, list[list[int]]] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: _serve(compiled, [prompts[i]], 6)})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [greedy(model, prompts[i], 6)] for i in range(2)}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"induktor": True}, ValueError, "unknown option 'induktor'.*inductor, self_check"),
        ({"page_size": 32}, ValueError, "unknown option 'page_size'.*are variables, such as PAGED_ATTN_PAGE_SIZE=32"),
        ({"self_check": "no"}, TypeError, "option 'self_check'.*allowed is bool"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, object], error: type[Exception], words: str) -> None:
    compiled = torch.compile(build_short("llama"), backend="paged_attn", options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=words) as raised:
        compiled(torch.tensor([[2, 3]]))
    assert isinstance(raised.value.inner_exception, error)


class _Unprovable(nn.Module):
    """Attends causally, and to the first three positions from anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(96, 16), nn.Linear(16, 16)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        x = self.embed(input_ids) + position_ids[..., None] * 0.01
        q = self.attention(x).unflatten(-1, (2, 8)).transpose(1, 2)
        i = torch.arange(input_ids.shape[1])
        mask = (i[None] <= i[:, None]) | (i[None] < 3)
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dynamic", [True, False])
def test_an_unproved_mask_raises_and_is_drawn(dynamic: bool) -> None:
    compiled = torch.compile(_Unprovable(), backend="paged_attn")
    ids = torch.arange(9)[None]
    positions = ids.clone()
    for tensor in (ids, positions) if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 1)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"cannot be proved.*\n###\.") as raised:
        compiled(input_ids=ids, position_ids=positions)
    assert isinstance(raised.value.inner_exception, UnsupportedError)


def test_gradients_are_off_inside_a_context_and_as_before_after_it() -> None:
    compiled = torch.compile(build_short("llama"), backend="paged_attn")
    pool = KVPool(attention_layers(compiled), 4, 16, torch.float32)
    for _ in range(3):
        batch = Batch.build([BatchRequest([5, 6, 7], [1])], 16)
        with forward_context(batch, pool):
            assert not compiled(**batch.model_inputs()).logits.requires_grad
        assert torch.is_grad_enabled()
    assert len(graphs_of(compiled)) == 1


def test_a_second_model_that_shares_the_graph_is_checked_as_well() -> None:
    first, second = build_short("llama", seed=0), build_short("llama", seed=1)
    for model in (first, second):
        compiled, prompts = torch.compile(model, backend="paged_attn"), random_prompts((4, 9))
        assert _serve(compiled, prompts, 4) == [greedy(model, p, 4) for p in prompts]
        (graph,) = graphs_of(compiled)
    assert len(graph._checked) == 2


def test_a_model_compiled_with_dynamic_true_is_paged_as_well() -> None:
    """Dynamo makes every number symbolic then, scale and window included; they become constants again."""
    model, prompts = build_short("mistral"), random_prompts((4, 19))
    compiled = torch.compile(model, backend="paged_attn", dynamic=True)
    assert _serve(compiled, prompts, 4) == [greedy(model, p, 4) for p in prompts]


class _Encoder(nn.Module):
    """Every token sees its whole request; learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.project = nn.Embedding(96, 16), nn.Embedding(64, 16), nn.Linear(16, 48)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.project(x).chunk(3, dim=-1))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_bidirectional_model_runs_whole_prompts_in_a_ragged_batch() -> None:
    torch.manual_seed(0)
    model, prompts = _Encoder().eval(), random_prompts((3, 9, 1))
    compiled = torch.compile(model, backend="paged_attn")
    layers = attention_layers(compiled)
    assert [spec.causal for spec in layers] == [False]
    batch = Batch.build([BatchRequest(p, [i + 1]) for i, p in enumerate(prompts)], 16)
    with torch.no_grad(), forward_context(batch, KVPool(layers, 4, 16, torch.float32)):
        rows = compiled(**batch.model_inputs())[0]
    for prompt, got in zip(prompts, rows.split([3, 9, 1]), strict=True):
        ids = torch.tensor([prompt])
        assert torch.allclose(got, model(ids, torch.arange(len(prompt))[None])[0], atol=1e-5)


def test_a_part_of_a_broken_forward_says_that_it_is_one() -> None:
    """Its own inputs are hidden states; that the call has no input_ids would be untrue."""
    model = build_short("llama")
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) if x.sum().item() < 1e9 else x  # a graph break
    compiled = torch.compile(model, backend="paged_attn")
    batch = Batch.build([BatchRequest([5, 6, 7], [1])], 16)
    pool = KVPool(attention_layers(build_short("llama")), 4, 16, torch.float32)
    words = "broke the model's forward into several graphs, of which it is one.*fullgraph=True"
    with pytest.raises(UnsupportedError, match=words) as told, torch.no_grad(), forward_context(batch, pool):
        compiled(**batch.model_inputs())
    assert "inside the context" not in str(told.value)


class HidesPadding(nn.Module):
    """One layer that does not see tokens of id 0, and says so itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(96, 32), nn.Linear(32, 96), nn.Linear(32, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        (batch, length), x = ids.shape, self.embed(ids)
        q, k, v = (each.view(batch, length, 4, 8).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        causal, own = torch.ones(length, length, dtype=torch.bool).tril(), torch.eye(length, dtype=torch.bool)
        mask = causal & (ids != 0)[:, None, None] | own
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: torch.Tensor = self.head(x + attended.transpose(1, 2).reshape(batch, length, 32))
        return out


@pytest.mark.parametrize("rows", [1, 2])
def test_padding_that_a_model_finds_in_the_ids_of_its_first_call_does_not_stop_it(rows: int) -> None:
    model = HidesPadding().eval()
    ids = torch.randint(1, 96, (rows, 12))
    ids[0, :5] = 0
    compiled = torch.compile(model, backend="paged_attn")
    with torch.no_grad():
        assert torch.equal(compiled(ids), model(ids))
