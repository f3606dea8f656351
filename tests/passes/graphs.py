"""Tracing toy modules and models the way the engine does, for the tests of the passes.

`trace` captures the Dynamo graph of `module(input_ids=..., position_ids=...)` with T marked dynamic; `rewrite_of` runs the passes
inside the compile backend, where they run in production; `assert_ragged_equals_alone` runs the rewritten graph on packed prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.selection.select import select_for_pool
from paged_attn.passes.fx.call_form import CallForm, CallNotPaged, find_call_form
from paged_attn.passes.fx.graph_tools import copy_graph_module
from paged_attn.passes.report import Rewrite
from paged_attn.passes.runner import rewrite

VOCAB = 32
TOKENS = 12


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Toy(nn.Module):
    """embedding + f(positions) -> `attend(query, key, value, input_ids, position_ids)` -> logits.

    query, key, value are [1, heads, T, dim] with 4 heads, 2 KV heads and a dim of 8 unless told; attend returns [1, 4, T, v_dim].
    """

    def __init__(self, attend: Attend, *, heads: int = 4, kv_heads: int = 2, dim: int = 8, v_dim: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.dim, self.v_dim = attend, dim, v_dim or dim
        self.embed = nn.Embedding(VOCAB, 32)
        self.q = nn.Linear(32, heads * dim)
        self.k = nn.Linear(32, kv_heads * dim)
        self.v = nn.Linear(32, kv_heads * self.v_dim)
        self.head = nn.Linear(heads * self.v_dim, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + torch.sin(position_ids[..., None] * 0.1)
        query = self.q(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        key = self.k(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        value = self.v(x).unflatten(-1, (-1, self.v_dim)).transpose(1, 2)
        attended = self.attend(query, key, value, input_ids, position_ids)
        return self.head(attended.transpose(1, 2).flatten(2))


class MaskedAttention(nn.Module):
    """Attention under the mask that `mask(input_ids, position_ids)` builds."""

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor | None], sdpa: dict[str, Any]) -> None:
        super().__init__()
        self.mask, self.sdpa = mask, sdpa

    def forward(self, query: Tensor, key: Tensor, value: Tensor, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        mask = self.mask(input_ids, position_ids)
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True, **self.sdpa)


def masked(mask: Callable[[Tensor, Tensor], Tensor | None], **sdpa: Any) -> Toy:
    """A toy whose module `attend` attends under that mask."""
    return Toy(MaskedAttention(mask, sdpa))


@dataclass
class Traced:
    """One captured graph; `result` is what `work` returned inside the backend."""

    gm: fx.GraphModule
    args: Sequence[Any]
    form: CallForm
    result: Any = None

    @property
    def values(self) -> dict[fx.Node, Any]:
        return dict(zip([n for n in self.gm.graph.nodes if n.op == "placeholder"], self.args, strict=True))


def graph_of(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    """Dynamo's graph of a plain function, for calls of these shapes."""
    torch._dynamo.reset()
    found: list[fx.GraphModule] = []

    def capturing(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch.compile(function, backend=capturing, fullgraph=True, dynamic=False)(*args)
    return found[0]


def called(graph: fx.Graph, name: str) -> list[fx.Node]:
    """The nodes that call a function or method of this name."""
    return [n for n in graph.nodes if (str(n.target) if n.op == "call_method" else getattr(n.target, "__name__", "")) == name]


def model_inputs(length: int = TOKENS, vocabulary: int = VOCAB) -> dict[str, Tensor]:
    ids = torch.randint(1, vocabulary, (1, length), generator=torch.Generator().manual_seed(length))
    inputs = {"input_ids": ids, "position_ids": torch.arange(length)[None]}
    for tensor in inputs.values():
        torch._dynamo.mark_dynamic(tensor, 1)
    return inputs


def trace(
    module: nn.Module, work: Callable[[Traced], Any] | None = None, *, reset: bool = True, vocabulary: int = VOCAB, **extra: Any
) -> Traced:
    """The module's graph; `work` runs inside the backend call, and what it raises of ours is raised from here, unwrapped."""
    if reset:
        torch._dynamo.reset()
    found: list[Traced] = []
    errors: list[Exception] = []

    def capturing(gm: fx.GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
        traced = Traced(gm, list(args), find_call_form(gm.graph))
        found.append(traced)
        try:
            traced.result = work(traced) if work is not None else None
        except (UnsupportedError, CallNotPaged) as error:
            errors.append(error)
        return gm.forward

    with torch.no_grad():
        torch.compile(module, backend=capturing, fullgraph=True)(**model_inputs(vocabulary=vocabulary), **extra)
    if errors:
        raise errors[0]
    assert len(found) == 1, f"{len(found)} graphs"
    return found[0]


def copied(traced: Traced) -> tuple[fx.GraphModule, CallForm, dict[fx.Node, Any]]:
    """The graph that is changed; Dynamo runs the other one."""
    gm = copy_graph_module(traced.gm)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    form = replace(traced.form, roles=dict(zip(placeholders, traced.form.roles.values(), strict=True)))
    return gm, form, dict(zip(placeholders, traced.args, strict=True))


def rewrite_of(module: nn.Module, model: nn.Module | None = None, **how: Any) -> Rewrite:
    """The passes on the module's graph; `model` is what `declared` may ask."""
    result: Rewrite = trace(module, lambda traced: rewrite(traced.gm, traced.args, model), **how).result
    return result


def assert_ragged_equals_alone(
    module: nn.Module, lengths: Sequence[int] = (5, 24, 13), vocabulary: int = VOCAB, optional: Collection[str] = ()
) -> Rewrite:
    """Rewritten graph on packed prompts in two steps (with chunks) = the plain module on each prompt alone."""

    def both(traced: Traced) -> tuple[Rewrite, float]:
        result = rewrite(traced.gm, traced.args, None, optional=optional)
        return result, ragged_error(module, result, traced.args, lengths, vocabulary)

    result, error = trace(module, both, vocabulary=vocabulary).result
    assert error < 1e-4, f"ragged logits are off by {error}"
    return result  # type: ignore[no-any-return]


def ragged_error(module: nn.Module, result: Rewrite, args: Sequence[Any], lengths: Sequence[int], vocabulary: int = VOCAB) -> float:
    """Largest difference of logits between the rewritten graph on packed prompts and the module on each prompt alone."""
    assert result.gm is not None, result.not_paged
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, vocabulary, (n,), generator=generator) for n in lengths]
    page_size = 4
    per_request = -(-max(lengths) // page_size)
    pool = KVPool(result.specs, 1 + per_request * len(lengths), page_size, torch.float32, torch.device("cpu"))
    backend = select_for_pool("auto", pool).backend
    tables = [list(range(1 + r, 1 + per_request * len(lengths), len(lengths))) for r in range(len(lengths))]
    worst = 0.0
    first = [max(1, n // 2) for n in lengths]
    with torch.no_grad():
        alone = [_logits(module(input_ids=p[None], position_ids=torch.arange(len(p))[None])) for p in prompts]
        for starts, ends in (([0] * len(lengths), first), (first, list(lengths))):
            active = [i for i in range(len(lengths)) if ends[i] > starts[i]]
            batch = Batch.build(
                [BatchRequest(prompts[i][starts[i] : ends[i]].tolist(), tables[i], starts[i], 1) for i in active], page_size
            )
            with ForwardContext(batch, pool, backend):
                output = result.gm.forward(*_filled(result, args, batch))
            ends_of_rows = batch.query_start[1:] - 1
            logits = _logits(output)[ends_of_rows]
            worst = max(worst, *(float((logits[row] - alone[i][ends[i] - 1]).abs().max()) for row, i in enumerate(active)))
    return worst


def _filled(result: Rewrite, args: Sequence[Any], batch: Batch) -> list[Any]:
    given = {"input_ids": batch.input_ids[None], "position_ids": batch.positions[None], "tokens": batch.num_rows}
    return [given.get(role, arg) for role, arg in zip(result.form.roles.values(), args, strict=True)]


def _logits(output: Any) -> Tensor:
    """[T, vocabulary]"""
    if hasattr(output, "logits"):
        output = output.logits
    logits: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return logits[0]
