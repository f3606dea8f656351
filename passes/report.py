"""What the passes found and did, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx, nn

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

    operands: where query, key and value come from in the traced graph; none where they are not a mere change of layout of its values.
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
    mixes: MixesRows | None = None  # what mixes tokens, if anything does; `gm` is None unless only a far position moves others
    seconds: dict[str, float] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    positions_redirected: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # by name, from passes that count what they did; see `GraphPass.did`
    merges: tuple[Merge, ...] = ()
    experts: dict[str, int] = field(default_factory=dict)  # layers of experts that are one op, by the backend that computes them
    experts_per_choice: int = 0  # experts of a layer per expert that a token chooses; the most of all layers
    max_positions: int | None = None  # as far as the graph shows; a longer sequence cannot run
    evaluated: tuple[int, ...] = ()  # the inputs on whose values the proofs rest
    baked: tuple[int, ...] = ()  # those of them, tensors of the model, that a spec was made of (a bias, a window, a scale)
    traced: dict[str, str] = field(default_factory=dict)  # nodes that stand for the same value in the traced graph, by their names in both
    modules: dict[str, str] = field(default_factory=dict)  # for a graph from disk: modules of the traced graph's nodes

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(report.spec for report in self.layers)


@dataclass
class Facts:
    """What all passes are given beside the graph, and where they put what they found.

    Attributes:
        original: the graph as Dynamo traced it; it stays as it is.
        form: which call it was traced from, by the placeholders of the copy.
        values: the tensors behind the placeholders; remembers which were read.
        model: if it is known.
        latents: of each site that keeps a latent, its maps; of one that looks like it, why it does not; by the place of the site.
        sites: every attention, once it was found; those that a later pass replaced are in `result.layers`.
        proofs: of each site, why it may be replaced and by what.
        choose_experts: names the backend that computes a layer of experts; None if there is none.
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
        name: by which it is listed, timed, dumped and switched off.
        what: it does, in a line.
        run: changes the graph in place and says what it did, in words or as a number; raises UnsupportedError or CallNotPaged if it cannot.
        did: the words around such a number.
    """

    name: str
    what: str
    run: Callable[[fx.Graph, Facts], str | int]
    did: str = ""

    @property
    def optional(self) -> bool:
        """Without it the graph is as right, and slower."""
        return self.name in OPTIONAL
