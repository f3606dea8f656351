"""What a written-out attention does to q.k before the softmax, proved on values: a scale or a softcap, and sinks.

The subgraph between q.k and the weights is evaluated on chosen products. If the scores are f(q.k) + mask and bias, then each row relative
to its diagonal, where q.k is set to 0, gives f itself. It must be linear or c * tanh(a * x / c), the same for every head, query and key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.find.attention_site import AttentionSite, UnknownAttention, WrittenScores, module_path
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import argument_of, name_of, shape_at, value_of
from paged_attn.passes.fx.mask_literals import HIDES, hidden_numbers, scaled_numbers
from paged_attn.passes.fx.slicing import ancestors, evaluate
from paged_attn.passes.fx.token_data import counts_in_numbers
from paged_attn.passes.prove.bias_family import FloatArray
from paged_attn.passes.prove.score_subgraph import MixesHeads, OtherWeights, needed_for_values, placeholder_value, score_path, zeros_for

TOKENS, MORE_TOKENS = 11, 609
MOST_SCORES = 1 << 22  # elements
EXACT, ROUNDED = 2e-5, 2e-2  # relative to the largest value; ROUNDED where the graph computes scores or weights in 16 bits
SATURATED = 1e7
FAR, FAR_IN_LOGARITHMS = 50.0, 30.0  # largest products, and scores that are read off weights: exp() of more is 0 or infinite
ALIKE = 1e-3  # tolerance between weights and sinks of the same rows, computed in two ways
NOTHING = 4e-6  # weights up to this count as zero
HIDDEN = -1e30


@dataclass(frozen=True)
class ScoreFunction:
    """scores = softcap * tanh(scale * q.k / softcap), or scale * q.k without a softcap.

    Attributes:
        first_column: index of the first key among the softmax's columns: 1 if a sink comes first.
        sinks: the node [heads] that holds the sinks' logits, or None.
        constant_sinks: the logits [heads] themselves, if they are constants of the graph.
        by_head: a further factor of each head's products, if heads differ (a learned temperature).
    """

    scale: float
    softcap: float | None
    first_column: int = 0
    sinks: fx.Node | None = None
    constant_sinks: tuple[float, ...] | None = None
    by_head: tuple[float, ...] | None = None

    @property
    def has_sinks(self) -> bool:
        return self.sinks is not None or self.constant_sinks is not None

    def of(self, products: FloatArray) -> FloatArray:
        """The scores for products q.k, without mask and sinks."""
        scaled = self.scale * products
        return scaled if self.softcap is None else np.asarray(self.softcap * np.tanh(scaled / self.softcap))

    def describe(self) -> str:
        words = [f"scale {self.scale:.4g}"]
        words += [f"times {min(self.by_head):.4g} to {max(self.by_head):.4g} by head"] if self.by_head is not None else []
        words += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        words += ["sinks"] if self.has_sinks else []
        return ", ".join(words)


def mixed_heads(site: AttentionSite, form: CallForm, values: Values) -> MixesHeads | None:
    """The refusal of an attention in which scores or weights of a head depend on other heads' products; None for any other attention."""
    try:
        ScoreRegion(site, form, values).check_heads()
    except UnsupportedError as reason:  # any other refusal: the parts cannot be evaluated separately
        return reason if isinstance(reason, MixesHeads) else None
    return None


class ScoreRegion:
    """The nodes between the products and the weights of a written-out attention, evaluated on a row of tokens.

    Attributes:
        nodes, shapes, stops, result: as in `SubgraphProbe`.
        sample, products: random products [.., T, T] in float64, and as evaluated [heads, T, T], with zeros on the diagonal.
    """

    def __init__(self, site: AttentionSite, form: CallForm, values: Values, tokens: int = TOKENS) -> None:
        scores = site.scores
        assert isinstance(scores, WrittenScores)
        self.site, self.scores, self.form, self.values, self.tokens = site, scores, form, values, tokens
        self.stops, self.result = {scores.products}, scores.weights
        last = scores.scores if scores.of_weights else scores.weights
        self.nodes, self.shapes = needed_for_values(last, scores.output, self.stops)
        self.given: dict[fx.Node, Any] = {node: zeros_for(node, form, tokens) for node in self.shapes}
        for node in self.nodes:
            if node.op == "placeholder":
                self.given[node] = placeholder_value(form.roles.get(node, ""), values[node], (tokens,), torch.arange(tokens) % TOKENS + 2)
        shape = shape_at(scores.products, form.num_tokens, tokens)
        self.sample = torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 2
        self.products = self.sample.reshape(-1, tokens, tokens).numpy().copy()
        self.products[:, np.arange(tokens), np.arange(tokens)] = 0.0

    def prove(self) -> ScoreFunction:
        """Reads scale, softcap and sinks off the values.

        Raises:
            MixesHeads: scores or weights of a head depend on other heads' products.
            UnsupportedError: the scores are no such function of q.k, the weights are not their softmax, or the sinks are not one logit per
                head.
        """
        if self.scores.of_weights and not self._softmax_gives_weights(0):
            raise self.refusal("those of a query do not add up to 1, or some are below 0")
        self.check_heads()
        function = self.fit()
        self.check_numbers()
        self.check_weights(function.first_column)
        return function

    def check_further(self, function: ScoreFunction, longest: int | None) -> None:
        """Checks the function on enough tokens, up to `longest`, to show changes with distance, row or column. Raises as `prove`."""
        tokens = min(longest or MORE_TOKENS, MORE_TOKENS, math.isqrt(MOST_SCORES // len(self.products)))
        further = ScoreRegion(self.site, self.form, self.values, max(tokens, TOKENS))
        further.check_scores(function)
        further.check_weights(function.first_column)
        if self.scores.of_weights:
            further.check_sums(function)
        if function.has_sinks:
            further.check_sinks(function)

    def run(self, products: Tensor, result: fx.Node, diagonal: float = 0.0) -> FloatArray:
        """The value [heads, T, columns] of a node for these products with `diagonal` on their diagonals."""
        index = torch.arange(self.tokens)
        given = products.clone()
        given[..., index, index] = diagonal
        value = self._evaluated(given.to(value_of(self.scores.products).device), result)
        value = value.double().clamp(min=HIDDEN)  # -inf would leave NaN in differences
        return np.asarray(value.reshape(-1, self.tokens, value.shape[-1]).numpy(force=True))

    def _evaluated(self, products: Tensor, result: fx.Node) -> Tensor:
        """Evaluated in float64, or in the graph's dtype if another operand requires that."""
        own = value_of(self.scores.products).dtype
        for dtype in (products.dtype, own):
            try:
                value: Tensor = evaluate(self.nodes, {**self.given, self.scores.products: products.to(dtype)}, result)
            except (RuntimeError, IndexError) as error:
                if dtype is own:
                    raise self.refusal(f"the graph between its products and weights cannot be evaluated: {error}") from error
            else:
                return value
        raise AssertionError("the graph's own dtype was tried last")

    def check_heads(self) -> None:
        """Changes the products of the first head: scores and weights of the others must stay the same."""
        changed = self.sample.clone().view(-1, self.tokens, self.tokens)
        changed[0] = -changed[0] + 1
        for result, what in ((self.scores.scores, "scores"), (self.scores.weights, "weights")):
            before, after = (np.nan_to_num(self.run(each.view(self.sample.shape), result)[1:]) for each in (self.sample, changed))
            if before.shape == after.shape and not _close(before, after):
                raise MixesHeads(
                    f"{self.site.where}: attention that is written out as a softmax cannot be proved: the {what} of a head also depend on "
                    "the products of other heads (talking heads). Run this model without paged_attn, or report it."
                )

    def fit(self) -> ScoreFunction:
        still = self.run(torch.zeros_like(self.sample), self.scores.scores)
        extra = still.shape[-1] - self.tokens
        if self.scores.lse is not None and (extra or np.diagonal(still, axis1=1, axis2=2).any()):
            raise self.refusal("the log-sum-exp of its scores is used, and its scores have a sink or are shifted row by row")
        if extra not in (0, 1):
            raise self.refusal(f"its softmax has {extra} columns besides the tokens'; known are none and one sink")
        first = self._first_column() if extra else 0
        seen, moved = self._seen_and_moved(still, first)
        by_head = self._by_head(still, first)
        if by_head is not None:
            seen, moved = self._seen_and_moved(still, first, by_head)
        if not seen.size:
            raise self.refusal("the mask hides all queries and keys whose product is 0")
        softcap, scale = None, float((moved(1.0) * seen).sum() / (seen * seen).sum())
        far = FAR
        if self.scores.of_weights:
            far = min(far, FAR_IN_LOGARITHMS / max(float(np.abs(scale * seen).max()), 1e-6))
        if not _close(scale * seen * far, moved(far)):
            softcap = float(np.abs(moved(SATURATED)).max())
            if softcap == 0:
                raise self.refusal("its scores do not depend on q.k")
            inner = np.arctanh(np.clip(moved(0.5) / softcap, -0.999, 0.999)) * softcap
            scale = float((inner * seen).sum() / (0.5 * seen * seen).sum())
        scale, softcap = _rounded(scale), softcap and _rounded(softcap)
        function = ScoreFunction(scale, softcap, by_head=by_head)
        if not all(_close(function.of(seen * by), moved(by)) for by in (0.1, 1.0, min(20.0, far))):
            raise self.refusal("its scores are neither scale * q.k nor softcap * tanh(scale * q.k / softcap) plus a mask")
        if not extra or (self.scores.of_weights and bool((np.abs(self._lacking(function)) <= NOTHING).all())):
            return function
        logits = self._sink_of(still, first)
        if not all(_close(logits, self._sink_of(self.run(self.sample * by, self.scores.scores), first)) for by in (1.0, -1.0)):
            raise self.refusal("its sink is made of q.k")
        node, constant = self._sinks(logits)
        function = ScoreFunction(scale, softcap, first, node, constant, by_head)
        if self.scores.of_weights:
            self.check_sums(function)
        return function

    def _sink_of(self, scores: FloatArray, first: int) -> FloatArray:
        """[heads, T]: the sink relative to the score of q.k = 0."""
        return scores[:, :, 0 if first else self.tokens] - np.diagonal(scores[:, :, first : first + self.tokens], axis1=1, axis2=2)

    def _lacking(self, function: ScoreFunction) -> FloatArray:
        """1 - the sum of each query's weights, also for products that are all very large or very small: `+ 1e-8` in the denominator is a
        sink unless the largest `exp(x - max)` is 1."""
        far = FAR_IN_LOGARITHMS / max(abs(function.scale), 1e-6)
        return np.stack([1 - self.run(self.sample + at, self.scores.weights, at).sum(-1) for at in (0.0, far, -far)])

    def check_sums(self, function: ScoreFunction) -> None:
        """Checks weights that no softmax makes: those of a query add up to 1, or to less if there is a sink."""
        lacking = self._lacking(function)
        most = 1.0 if function.has_sinks else NOTHING
        if not ((lacking >= -NOTHING) & (lacking <= most)).all() or min(function.constant_sinks or [0.0]) <= HIDES:
            raise self.refusal("those of a query do not add up to 1")

    def check_sinks(self, function: ScoreFunction) -> None:
        """Checks that the sinks are the same for all rows of these tokens."""
        logits = self._sink_of(self.run(torch.zeros_like(self.sample), self.scores.scores), function.first_column)
        known = function.constant_sinks or self.given[function.sinks].double().flatten().numpy(force=True)  # type: ignore[index]
        expected = np.broadcast_to(np.asarray(known)[:, None], logits.shape)
        if not np.abs(expected - logits).max() <= ALIKE * max(1.0, float(np.abs(expected).max())):
            raise self.refusal(f"its sinks differ between {self.tokens} and {TOKENS} tokens")

    def _first_column(self) -> int:
        for first in (0, 1):
            if self._softmax_gives_weights(first):
                return first
        raise self.refusal("its weights are not the softmax of its scores without the column of the sink")

    def _softmax_gives_weights(self, first: int) -> bool:
        scores, weights = (self.run(self.sample, node) for node in (self.scores.scores, self.scores.weights))
        expected = _softmax(scores)[:, :, first : first + self.tokens]
        rounded = any(value_of(node).dtype.itemsize < 4 for node in (self.scores.softmax, self.scores.weights))
        return weights.shape == expected.shape and _close(expected, weights, ROUNDED if rounded else ALIKE)

    def _by_head(self, still: FloatArray, first: int) -> tuple[float, ...] | None:
        """Each head's factor of q.k, relative to the largest; None if heads do not differ, or their scores are not multiples of q.k."""
        scores = self.run(self.sample, self.scores.scores)[:, :, first : first + self.tokens]
        still = still[:, :, first : first + self.tokens]
        visible = still > HIDES
        moved = np.where(visible, _from_diagonal(scores) - _from_diagonal(still), 0.0)
        seen = np.where(visible, self.products, 0.0)
        scales = (moved * seen).sum((1, 2)) / np.maximum((seen * seen).sum((1, 2)), 1e-30)
        if not _close(scales[:, None, None] * seen, moved) or _close(scales[0] * seen, moved) or not scales.all():
            return None
        return tuple(float(scale / scales[np.abs(scales).argmax()]) for scale in scales)  # no query grows in 16 bits

    def _seen_and_moved(
        self, still: FloatArray, first: int, by_head: tuple[float, ...] | None = None
    ) -> tuple[FloatArray, Callable[[float], FloatArray]]:
        """The products that no mask hides, and a function: factor -> what the scores make of them times it. `still`: scores of zeros."""
        still = still[:, :, first : first + self.tokens]
        visible = still > HIDES

        def moved(by: float) -> FloatArray:
            scores = self.run(self.sample * by, self.scores.scores)[:, :, first : first + self.tokens]
            return np.asarray((_from_diagonal(scores) - _from_diagonal(still))[visible])

        products = self.products if by_head is None else self.products * np.array(by_head)[:, None, None]
        return products[visible], moved

    def check_scores(self, function: ScoreFunction) -> None:
        """Checks that scores are this function of q.k at every distance that these tokens show."""
        still = self.run(torch.zeros_like(self.sample), self.scores.scores)
        seen, moved = self._seen_and_moved(still, function.first_column, function.by_head)
        if not _close(function.of(seen), moved(1.0)):
            raise self.refusal(
                f"its scores are another function of q.k on {self.tokens} tokens than on {TOKENS}, as with a distance or a row"
            )

    def check_numbers(self) -> None:
        """Refuses numbers made from T, or large enough to start to matter at a distance: no probe is long enough to show these."""
        for node in sorted(score_path(self.nodes, self.scores.products)):
            if counts := counts_in_numbers(node, self.form):
                raise self.refusal(f"{counts[0].name}, which is made from the number of tokens, goes into the numbers of {node.name}")
        before = set(ancestors(self.scores.products, self.scores.output))
        if self.scores.of_weights:
            return
        needed, _ = needed_for_values(self.scores.weights, self.scores.output, (self.scores.softmax,))
        inactive = {node for node in needed if name_of(node) == "dropout" and argument_of(node, 2, "training") is False}
        after = [node for node in needed if node not in before | inactive]
        owned = {node: value for node in after if isinstance(value := self.given.get(node), Tensor)}
        if numbers := [*hidden_numbers(after, owned), *map(str, scaled_numbers(after))]:
            raise self.refusal(f"operations on its weights after the softmax hold {', '.join(numbers)}, which may start to matter later")

    def check_weights(self, first: int) -> None:
        if not self._softmax_gives_weights(first):
            raise self.refusal("its weights are not the softmax of its scores: they are changed before they are multiplied with the values")

    def _sinks(self, logits: FloatArray) -> tuple[fx.Node | None, tuple[float, ...] | None]:
        """The owned tensor with the sinks' logits [heads, T], or the logits themselves if they are constants of the graph."""
        if not _close(np.broadcast_to(logits[:, :1], logits.shape), logits):
            raise self.refusal("its sink differs between queries")
        heads = logits.shape[0]
        path = score_path(self.nodes, self.scores.products)
        beside = [source for node in path for source in node.all_input_nodes if source not in path]
        for node in sorted(set(ancestors(beside, self.scores.softmax)) & set(self.given)):
            value = self.given[node]
            if isinstance(value, Tensor) and value.numel() == heads and value.is_floating_point():
                if _close(value.double().flatten().numpy(force=True), logits[:, 0]):
                    return node, None
        if _close(np.full_like(logits, logits[0, 0]), logits):
            return None, (round(float(logits[0, 0]), 9),) * heads
        raise self.refusal("its sinks are not a parameter of one logit a head")

    def refusal(self, why: str) -> UnsupportedError:
        if self.scores.of_weights:
            return OtherWeights(f"{self.site.where}: no softmax makes the weights of its attention: {why}")
        return UnknownAttention(
            module_path(self.scores.softmax),
            f"{self.site.where}: attention that is written out as a softmax cannot be proved: {why}. "
            "LLM(model) runs a module that returns one row per token as it is, on all tokens; otherwise run the model without paged_attn, "
            "or report it.",
        )


def _from_diagonal(scores: FloatArray) -> FloatArray:
    return scores - np.diagonal(scores, axis1=1, axis2=2)[:, :, None]


def _softmax(scores: FloatArray) -> FloatArray:
    exponents = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(exponents / exponents.sum(axis=-1, keepdims=True))


def _close(expected: FloatArray, got: FloatArray, tolerance: float = EXACT) -> bool:
    largest = max(float(np.abs(expected).max(initial=0.0)), 1e-6)
    return bool(np.abs(expected - got).max(initial=0.0) <= tolerance * largest)


def _rounded(number: float) -> float:
    """A fitted number without the noise of the fit: the nearest simple number (1, 50, 0.25, 1/n, 1/sqrt(n)) if there is one close by."""
    candidates = [round(number, 6)]
    if 1e-6 < abs(number) < 1:
        candidates += [math.copysign(round(1 / number**2) ** -0.5, number), 1 / round(1 / number, 6)]
    return float(next((c for c in candidates if abs(c - number) <= 1e-6 * abs(number)), number))
