"""Proves what each found attention computes: mask, bias, scale or softcap, sinks. Equal layers are proved once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, fx, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.find.attention_site import AttentionSite, DualChunkScores, ModuleScores, NearbyRows, SdpaScores, WrittenScores
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import value_of
from paged_attn.passes.fx.model_facts import least, max_positions
from paged_attn.passes.fx.slicing import kind_of
from paged_attn.passes.prove.bias_family import BiasFamily
from paged_attn.passes.prove.config_claims import check_declared, check_declared_chunks
from paged_attn.passes.prove.dual_chunk import DualChunkProbe, DualChunkProof, prove_dual_chunk
from paged_attn.passes.prove.mask_family import MaskFamily, match_family
from paged_attn.passes.prove.mask_probe import MaskProbe, ShortTable, as_seen
from paged_attn.passes.prove.mask_proof import MaskProof, prove, unproved
from paged_attn.passes.prove.other_mask import OtherMask, hides_later_tokens
from paged_attn.passes.prove.score_function import MORE_TOKENS, ScoreFunction, ScoreRegion, mixed_heads
from paged_attn.passes.prove.score_subgraph import DependsOnHiddenStates, MixesNearby, MixesTokens, Recomputable
from paged_attn.passes.prove.subgraph_probe import SubgraphProbe


@dataclass(frozen=True)
class AttentionProof:
    """How one site's q.k becomes weights; `evidence` and `declared` are shown by `explain`."""

    family: MaskFamily
    function: ScoreFunction
    bias: BiasFamily | None
    evidence: str
    declared: str
    device: torch.device
    max_tokens: int | None


class Prover:
    """Proves the attentions of one graph.

    Args:
        model: None if it is unknown; its config is compared with what was proved.
    """

    def __init__(self, form: CallForm, values: Values, model: nn.Module | None) -> None:
        self.form, self.values, self.model = form, values, model
        self._proved: dict[Hashable, MaskProof] = {}
        self._dual_chunks: dict[Hashable, DualChunkProof] = {}
        self._seen_further: set[Hashable] = set()
        self._owned: list[Tensor] = []

    def prove(self, site: AttentionSite) -> AttentionProof | DualChunkProof:
        """Raises:
        Recomputable: its mask or bias is computed from the tokens' hidden states, it mixes its heads, or it is a whole module.
        UnsupportedError: the site cannot be proved, or contradicts what the model states; the message names the layer.
        CallNotPaged: it depends on an input of this call.
        """
        scores = site.scores
        if isinstance(scores, ModuleScores):
            raise MixesTokens(f"{site.where} mixes tokens in a way that is neither attention nor a recurrence")
        if isinstance(scores, NearbyRows):
            raise MixesNearby(f"{site.where} mixes rows with those of a few tokens before")
        if isinstance(scores, DualChunkScores):
            return self._dual_chunk(site, scores)
        if isinstance(scores, SdpaScores):
            function = ScoreFunction(scores.scale, None)
            mask = self._sdpa_mask(site, scores)
            has_mask = scores.mask is not None
        else:
            probe = self._probe_of(site, scores)
            region = ScoreRegion(site, self.form, self.values)
            function = region.prove()
            probe.first_column = function.first_column
            mask, has_mask = self._mask_of(probe, function.sinks), True
            self._check_further(region, function, mask.max_tokens)
            if scores.of_weights and max([probe.stored_length, *mask.family.limits]) >= MORE_TOKENS:
                raise region.refusal(f"whether those of a query add up to 1 is seen on {MORE_TOKENS} tokens, and something changes later")
            mask = replace(mask, evidence=f"scores evaluated: {function.describe()}; {mask.evidence}")
        declared = check_declared(self.model, site.module, mask.family, has_mask)
        query = value_of(site.query)
        bias = mask.bias and mask.bias.for_heads(int(query.shape[1]))
        return AttentionProof(mask.family, function, bias, mask.evidence, declared, query.device, mask.max_tokens)

    def _dual_chunk(self, site: AttentionSite, scores: DualChunkScores) -> DualChunkProof:
        probe = DualChunkProbe(site, scores, self.form, self.values)
        key = self._key(probe, None)
        if key not in self._dual_chunks:
            self._dual_chunks[key] = prove_dual_chunk(probe)
        proof = self._dual_chunks[key]
        return replace(proof, declared=check_declared_chunks(self.model, site.module, proof.chunk))

    def _probe_of(self, site: AttentionSite, scores: WrittenScores) -> MaskProbe:
        try:
            return MaskProbe(scores.scores, scores.softmax, self.form, self.values, site.where, scores.products)
        except Recomputable:
            raise
        except UnsupportedError as refusal:  # a matrix that mixes heads looks like a table of positions
            raise mixed_heads(site, self.form, self.values) or refusal from None

    def _sdpa_mask(self, site: AttentionSite, scores: SdpaScores) -> MaskProof:
        if scores.mask is None:
            return MaskProof(MaskFamily(scores.is_causal), "no mask, is_causal=" + str(scores.is_causal))
        proof = self._mask_of(MaskProbe(scores.mask, site.node, self.form, self.values, site.where), None)
        if scores.is_causal and not proof.family.causal:  # both given: a key must pass both
            return replace(proof, family=replace(proof.family, causal=True), evidence=proof.evidence + ", and is_causal=True")
        return proof

    def _mask_of(self, probe: MaskProbe, sinks: fx.Node | None) -> MaskProof:
        try:
            return self._cached(probe, sinks)
        except (Recomputable, ShortTable):
            raise
        except UnsupportedError as refusal:
            if hides_later_tokens(probe):
                raise OtherMask(str(refusal)) from refusal
            raise

    def _cached(self, probe: MaskProbe, sinks: fx.Node | None) -> MaskProof:
        key = (self._key(probe, sinks), probe.first_column)
        if key not in self._proved:
            self._proved[key] = prove(probe, max_positions(self.model))
        return self._proved[key]

    def _check_further(self, region: ScoreRegion, function: ScoreFunction, longest: int | None) -> None:
        key = (self._key(region, function.sinks), function.scale, function.softcap, function.first_column)
        if key not in self._seen_further:
            region.check_further(function, least(longest, self.form.max_tokens, max_positions(self.model)))
            self._seen_further.add(key)

    def _key(self, probe: SubgraphProbe | ScoreRegion, sinks: fx.Node | None) -> Hashable:
        """Equal for probes that compute the same from equal inputs. Sinks do not count as inputs of a mask."""
        told: dict[fx.Node, Hashable] = {}
        for node in probe.nodes:
            if node in probe.stops or node in probe.shapes:
                told[node] = node in probe.stops, str(value_of(node).shape), value_of(node).dtype
            elif node.op == "placeholder":
                value = self.values[node]
                same = self._same_tensor(value) if isinstance(value, Tensor) and node is not sinks else 0
                told[node] = self.form.roles[node], node is sinks, same
        return probe.nodes.index(probe.result), kind_of(probe.nodes, told)

    def _same_tensor(self, value: Tensor) -> int:
        """The same number for equal tensors."""
        for number, known in enumerate(self._owned):
            alike = known.shape == value.shape and known.dtype == value.dtype and known.device == value.device
            if known is value or (alike and torch.equal(known, value)):
                return number
        self._owned.append(value)
        return len(self._owned) - 1


def refuse_implausible(sites: list[AttentionSite], form: CallForm, values: Values) -> None:
    """Checks the masks of a call that is not paged: each must match some family, so that an unsupported model is still refused.

    Raises:
        UnsupportedError: a mask that matches none.
    """
    last = {site.scores.mask: site for site in sites if isinstance(site.scores, SdpaScores) and site.scores.mask is not None}
    for mask, site in last.items():
        try:
            probe = MaskProbe(mask, site.node, form, values, site.where)
        except DependsOnHiddenStates:
            continue  # a paged call evaluates it at run time
        if any(form.roles.get(node) == "input_ids" and node not in probe.shapes for node in probe.nodes):
            continue  # maybe padding, which differs between calls
        as_called = probe.evaluate_as_called()
        seen = as_seen(as_called, as_called.shape[-1], site.where).visible
        if match_family(seen) is None and np.triu(seen, 1).any():  # a causal mask can be recomputed
            raise unproved(site.where, seen, f"it matches no known family on the {seen.shape[0]} tokens of this call")
