"""The op: schema, opcheck, refusals, and what a compiled graph holds of it."""

import dataclasses

import pytest
import torch

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import ContextError, UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from tests.backends.problems import LAYER, Case, close, make, new_output, run, spec_of

LENGTHS = [(5, 3), (9, 1), (0, 4)]
NATIVE = TorchNativeBackend()
# Every one of opcheck's utilities applies, so none is left out; named here so that a new one is noticed. The one on autograd
# checks nothing unless an input requires grad, hence the variant "requires_grad".
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def test_schema_mutates_output_and_lse_out_alone():
    schema = torch.ops.paged_attn.unified_attention_with_output.default._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {"output", "lse_out"}
    assert {a.name for a in schema.arguments if a.alias_info is not None} == written
    assert schema.returns == []
    assert str(schema) == (
        "paged_attn::unified_attention_with_output(Tensor query, Tensor key, Tensor value, Tensor(a!) output, int layer_id, "
        "bool save_kv_cache, *, Tensor? sinks=None, Tensor? bias=None, Tensor? q_rope=None, Tensor? k_rope=None, Tensor? positions=None, "
        "Tensor(b!)? lse_out=None) -> ()"
    )


def test_the_bound_overload_is_the_registered_one():
    assert UNIFIED_ATTENTION is torch.ops.paged_attn.unified_attention_with_output.default
    assert isinstance(UNIFIED_ATTENTION, torch._ops.OpOverload)


@pytest.mark.parametrize("variant", ["plain", "sinks", "lse_out", "sinks_and_lse_out", "no_save", "requires_grad"])
@pytest.mark.parametrize("strides", ["contiguous", "transposed"])
def test_opcheck(variant, strides):
    case = make(LENGTHS, spec_of("sinks" if "sinks" in variant else "plain"), strides=strides)
    if variant == "no_save":
        run(case, NATIVE)
    case.query.requires_grad_(variant == "requires_grad")
    lse_out = torch.zeros(case.batch.num_rows, case.spec.num_q_heads) if "lse_out" in variant else None
    with ForwardContext(case.batch, case.pool, NATIVE):
        results = torch.library.opcheck(
            UNIFIED_ATTENTION,
            (case.query, case.key, case.value, new_output(case), LAYER, variant != "no_save"),
            {"sinks": case.sinks, "lse_out": lse_out},
        )
    assert results == dict.fromkeys(UTILITIES, "SUCCESS")


def call(case: Case, layer: int = LAYER, **optional) -> torch.Tensor:
    output = new_output(case)
    UNIFIED_ATTENTION(case.query, case.key, case.value, output, layer, True, **optional)
    return output


def test_outside_any_context():
    with pytest.raises(ContextError, match=r"outside any forward context; wrap the call in `with paged_attn\.forward_context"):
        call(make(LENGTHS))


@pytest.mark.parametrize("layer", [-1, 3, 100])
def test_a_layer_that_the_pool_lacks(layer):
    case = make(LENGTHS)
    with ForwardContext(case.batch, case.pool, NATIVE), pytest.raises(ContextError, match=f"layer {layer} is not in the pool, which has 3"):
        call(case, layer)


@pytest.mark.parametrize("rows", [1, 7, 9])
def test_the_wrong_number_of_rows(rows):
    case = make(LENGTHS)
    assert case.batch.num_rows == 8
    case.query, case.key, case.value = (t[:1].expand(rows, -1, -1) for t in (case.query, case.key, case.value))
    with (
        ForwardContext(case.batch, case.pool, NATIVE),
        pytest.raises(ContextError, match=rf"got {rows} rows .* batch has 8;.*model_inputs"),
    ):
        UNIFIED_ATTENTION(case.query, case.key, case.value, torch.zeros(rows, 4, 8), LAYER, True)


@pytest.mark.parametrize("name", ["q_rope", "k_rope", "positions"])
def test_reserved_arguments_are_refused(name):
    case = make(LENGTHS)
    before = case.pool.storage.clone()
    with ForwardContext(case.batch, case.pool, NATIVE), pytest.raises(UnsupportedError, match=f"{name}.*reserved"):
        call(case, **{name: torch.zeros(8, 4, 8)})
    torch.testing.assert_close(case.pool.storage, before, equal_nan=True, rtol=0, atol=0)


def test_an_error_in_the_op_leaves_the_context_usable():
    case = make(LENGTHS)
    with ForwardContext(case.batch, case.pool, NATIVE):
        with pytest.raises(ContextError):
            call(case, 17)
        assert not call(case).isnan().any()


def test_the_innermost_context_is_used():
    outer, inner = make([(0, 4)], seed=1), make([(0, 6)], seed=2)
    with ForwardContext(outer.batch, outer.pool, NATIVE):
        with ForwardContext(inner.batch, inner.pool, NATIVE):
            close(call(inner), run(inner, ReferenceBackend())[0])
        close(call(outer), run(outer, ReferenceBackend())[0])


def test_on_meta_tensors_it_does_nothing():
    """Shape propagation must not need a context."""
    UNIFIED_ATTENTION(*(torch.empty(4, 4, 8, device="meta") for _ in range(4)), 0, True)


# ---- in a compiled graph ----

PAGES = 1024  # so that a pool's K of one layer is far larger than any activation


class Layers(torch.nn.Module):
    """Two attention layers with some pointwise work around them, as a rewritten model has them."""

    def forward(self, x):
        for layer in (0, 1):
            q, k, v = x * 0.5, x[:, :2] + 1.0, x[:, 2:] - 1.0
            output = torch.ops.aten.new_empty.default(q, list(q.shape))
            UNIFIED_ATTENTION(q, k, v, output, layer, True)
            x = torch.tanh(output) + x
        return x


class CopiesPool(torch.nn.Module):
    """Negative control: the pool is a graph input and is copied."""

    def __init__(self, pool: KVPool):
        super().__init__()
        self.pool = pool

    def forward(self, x):
        return x + self.pool.storage.clone()[0]


def step(new: int) -> tuple[Batch, KVPool, torch.Tensor]:
    case = make([(0, new), (0, 3)])
    pool = KVPool([dataclasses.replace(case.spec, kv_layer=i) for i in range(2)], PAGES, 16, torch.float32)
    x = torch.randn(case.batch.num_rows, 4, 8, generator=torch.Generator().manual_seed(new))
    torch._dynamo.mark_dynamic(x, 0)
    return case.batch, pool, x


def compile_and_collect(module, kind: str):
    """The compiled module and the list of graphs that Dynamo, or AOTAutograd after it, hands to the backend."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    if kind == "aot_eager":
        from torch._dynamo.backends.common import aot_autograd

        backend = aot_autograd(fw_compiler=keep)
    else:
        backend = keep
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend), graphs


def largest(graphs) -> int:
    """Elements of the largest tensor that any node of the graphs has, inputs included; symbolic sizes count as their hint."""
    sizes = [0]
    for graph in graphs:
        for node in graph.graph.nodes:
            value = node.meta.get("val", node.meta.get("example_value"))
            for tensor in value if isinstance(value, tuple | list) else [value]:
                if isinstance(tensor, torch.Tensor):
                    sizes.append(int(tensor.untyped_storage().nbytes()) // tensor.element_size())
    return max(sizes)


def calls_of_op(graph) -> int:
    """Direct calls, and those wrapped by auto_functionalized in the graph that AOTAutograd makes."""
    return sum(UNIFIED_ATTENTION in (node.target, *node.args[:1]) for node in graph.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("kind", ["eager", "aot_eager"])
def test_a_compiled_graph_holds_no_pool(kind):
    compiled, graphs = compile_and_collect(Layers(), kind)
    for new in (5, 9):
        batch, pool, x = step(new)
        with ForwardContext(batch, pool, NATIVE):
            result = compiled(x)
        other = KVPool(pool.layers, PAGES, 16, torch.float32)
        with ForwardContext(batch, other, ReferenceBackend()):
            close(result, Layers()(x))
        close(pool.storage, other.storage)
    assert [calls_of_op(graph) for graph in graphs] == [2]
    assert 0 < largest(graphs) < pool.key(0).numel() // 10


@pytest.mark.parametrize("kind", ["eager", "aot_eager"])
def test_the_scan_sees_a_pool(kind):
    _, pool, x = step(5)
    compiled, graphs = compile_and_collect(CopiesPool(pool), kind)
    compiled(x)
    assert largest(graphs) >= pool.storage.numel()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_runs_under_the_stock_backends(backend):
    batch, pool, x = step(6)
    torch._dynamo.reset()
    compiled = torch.compile(Layers(), fullgraph=True, backend=backend)
    with ForwardContext(batch, pool, NATIVE):
        result = compiled(x)
    with ForwardContext(batch, pool, ReferenceBackend()):
        close(result, Layers()(x))


def test_a_compiled_graph_outside_a_context_raises_too():
    _, _, x = step(6)
    torch._dynamo.reset()
    compiled = torch.compile(Layers(), fullgraph=True, backend="eager")
    with pytest.raises(ContextError, match="outside any forward context"):
        compiled(x)
