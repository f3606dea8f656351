"""What the passes found and did, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx, nn

from paged_attn.attn_ops.errors import UnsupportedModule
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.passes.find.attention_site import AttentionSite
from paged_attn.passes.fx.call_form import CallForm, ReadValues
from paged_attn.passes.optimize.dense_experts import ChooseExperts
from paged_attn.passes.optimize.linears.merge import Merge
from paged_attn.passes.optional import OPTIONAL
from paged_attn.passes.positions.independent_rows import MixesRows
from paged_attn.passes.prove.attention import AttentionProof
from paged_attn.passes.prove.dual_chunk import DualChunkProof
from paged_attn.passes.prove.latent import LatentProof
from paged_attn.passes.prove.score_subgraph import Recomputable
from paged_attn.passes.replace.operand_layout import Operand


@dataclass(frozen=True)
class LayerReport:
    """One line of `explain`: the spec, how the attention was found and proved, and the nodes before and after.

    operands: where query, key and value come from in the traced graph; empty unless all three only rearrange values of that graph.
    """

    layer_id: int
    spec: AttentionSpec
    found_by: str
    proof: str
    declared: str
    original_node: str
    original_order: tuple[int, ...]
    op_node: str
    operands: tuple[Operand, ...] = ()


@dataclass
class Rewrite:
    """The rewritten graph of a paged call, or the reason why this call is not one (`gm` is None)."""

    form: CallForm
    gm: fx.GraphModule | None = None
    layers: list[LayerReport] = field(default_factory=list)
    not_paged: str = ""
    refused: UnsupportedModule | None = None  # the module that makes it none, which may run on all tokens of a request
    mixes: MixesRows | None = None  # what mixes tokens; `gm` is None then, unless only a far position affects other tokens
    seconds: dict[str, float] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    positions_redirected: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # by name, from passes that count what they did; see `GraphPass.did`
    merges: tuple[Merge, ...] = ()
    experts: dict[str, int] = field(default_factory=dict)  # number of expert layers that became one op, by backend
    as_written: dict[str, str] = field(default_factory=dict)  # blocks of experts that are no op, by path: their classes, and why
    experts_per_choice: int = 0  # number of experts / experts chosen per token, maximum over layers
    max_positions: int | None = None  # the longest sequence that the graph can run; None if it shows no limit
    evaluated: tuple[int, ...] = ()  # indices of the inputs whose values the proofs read
    baked: tuple[int, ...] = ()  # indices of the model's tensors whose values went into a spec (a bias, a window, a scale)
    traced: dict[str, str] = field(default_factory=dict)  # rewritten node name -> traced node name, where both have the same value
    modules: dict[str, str] = field(default_factory=dict)  # for a graph from disk: modules of the traced graph's nodes

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(report.spec for report in self.layers)


@dataclass
class Facts:
    """The input that all passes share beside the graph, and their results.

    Attributes:
        original: the graph as Dynamo traced it; never changed.
        form: the call that was traced, in terms of the copy's placeholders.
        values: the tensors behind the placeholders; records which were read.
        model: None if it is unknown.
        latents: by site index: the latent's maps, or why a site that looks latent is not.
        sites: all attentions that were found; those that a later pass replaced are in `result.layers`.
        proofs: one for each site.
        choose_experts: returns the name of the backend for a layer of experts; None if there is no such backend.
    """

    original: fx.Graph
    form: CallForm
    values: ReadValues
    model: nn.Module | None
    result: Rewrite
    sites: list[AttentionSite] = field(default_factory=list)
    proofs: list[AttentionProof | DualChunkProof | Recomputable] = field(default_factory=list)
    baked: set[fx.Node] = field(default_factory=set)
    latents: dict[int, LatentProof | str] = field(default_factory=dict)
    choose_experts: ChooseExperts | None = None


@dataclass(frozen=True)
class GraphPass:
    """One rewrite of a graph.

    Attributes:
        name: used in lists, timings and dumps, and to switch the pass off.
        what: what the pass does, in one line.
        run: changes the graph in place; returns what it did, in words or as a number. Raises UnsupportedError or CallNotPaged.
        did: format string for such a number.
    """

    name: str
    what: str
    run: Callable[[fx.Graph, Facts], str | int]
    did: str = ""

    @property
    def optional(self) -> bool:
        """Whether the graph is correct without this pass, only slower."""
        return self.name in OPTIONAL
