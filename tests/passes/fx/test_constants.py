"""Two models of one process that differ in a number: Dynamo makes it symbolic for the second, the passes make it a number again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import SymFloat, SymInt, Tensor

from paged_attn.passes.fx.graph_tools import source_name, value_of
from paged_attn.passes.report import Rewrite
from paged_attn.passes.runner import rewrite
from tests.passes.graphs import Toy, Traced, ragged_error, trace


class Configured(Toy):
    """Reads its scale as its own attribute, and its heads and window from a config object, as HF models do."""

    def __init__(self, heads: int, window: int, scale: float) -> None:
        super().__init__(self.attend_as_configured)
        self.config = SimpleNamespace(heads=heads, kv_heads=heads // 2, window=window)
        self.scale = scale

    def attend_as_configured(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        query = q.transpose(1, 2).reshape(1, -1, heads, 32 // heads).transpose(1, 2)
        key, value = (t.transpose(1, 2).reshape(1, -1, kv_heads, 32 // heads).transpose(1, 2) for t in (k, v))
        key, value = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, heads, -1, 32 // heads) for t in (key, value))
        i, j = pos[0][:, None], pos[0][None, :]
        out = F.scaled_dot_product_attention(query, key, value, (j <= i) & (i - j < self.config.window), scale=self.scale)
        return out.transpose(1, 2).reshape(1, -1, 4, 8).transpose(1, 2)


def rewritten(module: Configured) -> tuple[Rewrite, float, set[str]]:
    """The rewrite, its error on ragged prompts, and the kinds of symbolic numbers of the module in the graph."""

    def work(traced: Traced) -> tuple[Rewrite, float, set[str]]:
        kinds = {type(value_of(n)).__name__ for n in traced.gm.graph.nodes
                 if isinstance(value_of(n), SymFloat)
                 or (isinstance(value_of(n), SymInt) and n.op == "placeholder" and source_name(n).startswith("L['self']"))}  # fmt: skip
        result = rewrite(traced.gm, traced.args, None)
        return result, ragged_error(module, result, traced.args, (5, 24, 13)), kinds

    return trace(module, work, reset=False).result  # type: ignore[no-any-return]


@pytest.mark.parametrize("whole_numbers_too", [False, True])
def test_each_model_keeps_its_own_numbers(whole_numbers_too: bool) -> None:
    torch._dynamo.reset()
    seen: set[str] = set()
    for heads, window, scale in ((4, 8, 0.5), (8, 5, 0.25), (4, 4096, 0.75)):
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=whole_numbers_too):
            result, error, kinds = rewritten(Configured(heads, window, scale))
        (spec,) = result.specs
        assert (spec.num_q_heads, spec.num_kv_heads, spec.qk_head_dim) == (heads, heads // 2, 32 // heads)
        assert (spec.sliding_window, spec.scale) == (window, pytest.approx(scale))
        assert error < 1e-4
        seen |= kinds
    assert seen == ({"SymFloat", "SymInt"} if whole_numbers_too else {"SymFloat"}), (
        "Dynamo made nothing symbolic, so that this test shows nothing"
    )


def test_a_changed_number_of_one_model_is_traced_again() -> None:
    torch._dynamo.reset()
    module = Configured(4, 8, 0.5)
    for scale in (0.5, 0.25, 0.125):
        module.scale = scale
        result, error, _ = rewritten(module)
        assert result.specs[0].scale == pytest.approx(scale) and error < 1e-4


def test_the_guard_tells_the_numbers_apart() -> None:
    """One compiled function: the backend is called again for each scale, and not for one that it has seen."""
    torch._dynamo.reset()
    scales: list[float] = []

    def backend(gm: torch.fx.GraphModule, args: list[object]) -> object:
        scales.append(rewrite(gm, args, None).specs[0].scale)
        return gm.forward

    module = Configured(4, 8, 0.5)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    ids = torch.arange(12)[None]
    for tensor in (ids, pos := ids.clone()):
        torch._dynamo.mark_dynamic(tensor, 1)
    with torch.no_grad():
        for scale in (0.5, 0.25, 0.125, 0.25, 0.125):
            module.scale = scale
            compiled(input_ids=ids, position_ids=pos)
    assert scales == [0.5, 0.25, 0.125]
