"""From an evaluated mask to a proved family: matched on two probes, checked on others, or refused with the mask printed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.fx.mask_literals import LARGEST_SHOWN, is_size
from paged_attn.passes.prove.bias_family import BiasFamily, FloatArray, equals_bias, match_bias
from paged_attn.passes.prove.mask_family import BoolMatrix, MaskFamily, draw, match_family, packed_variants
from paged_attn.passes.prove.mask_probe import MaskProbe, Seen
from paged_attn.passes.prove.subgraph_probe import LIMITS, SCALES, ProbeFailed

MATCH_LENGTHS = (59, 67)
CHECK_LENGTHS = (41, 83)
PACKINGS = ((5, 26, 31), (1, 34, 9, 12))
DIRECT_LENGTH, DIRECT_LIMIT = 609, 2304  # tokens of the one unscaled check; up to the limit if the family only shows on more tokens
MOST_DIRECT_ELEMENTS = 1 << 24
LONGEST_BIAS = 4096  # tokens for which a bias that keeps changing is tabulated, if the model states no limit
MOST_BIAS_ELEMENTS = 1 << 27  # of one bias, evaluated for all positions of a model
MOST_SATURATED_ELEMENTS = 1 << 26  # of one that seems to change no more


@dataclass(frozen=True)
class MaskProof:
    """A mask family, the bias added to the scores, and how they were proved, in words."""

    family: MaskFamily
    evidence: str
    bias: BiasFamily | None = None
    max_tokens: int | None = None  # where a table of the mask or the bias ends


def prove(probe: MaskProbe, max_positions: int | None = None) -> MaskProof:
    """Finds the family of a traced mask and of its bias; the bias must be known for `max_positions`.

    Raises:
        UnsupportedError: no family fits, or the two scales do not agree; the message holds the layer and the mask.
        CallNotPaged: the mask is made from an input of this call.
    """
    try:
        return _prove(probe, max_positions)
    except ProbeFailed:
        if not probe.literals:
            probe.stored_end = _end_of_made_table(probe)
            if not probe.stored_end:
                raise
            return _prove(probe, max_positions)
    every = probe.literals
    try:
        limit = _table_limit(probe)  # a number that was scaled down may be the length of a table
    except ProbeFailed:
        probe.scales = SCALES
        if ends := probe.ends_of_stored():
            probe.literals, probe.stored_end = [literal for literal in every if literal not in ends], min(ends)
            return _prove(probe, max_positions)
        # Or the numbers belong to the bias, as the number of heads does in computed slopes: small ones are covered by the unscaled probe.
        probe.literals = [literal for literal in every if literal > DIRECT_LENGTH // 2]
        if len(probe.literals) == len(every) or probe.run((DIRECT_LENGTH,), None, seed=0).bias is None:
            raise
        return _prove(probe, max_positions)
    return _prove(probe, limit)


def _end_of_made_table(probe: MaskProbe) -> int:
    """How long a table is that each call makes and cuts to its tokens (`torch.ones(2048, 2048).tril()[:T, :T]`); 0 if none is."""
    sizes = {int(each) for node in probe.nodes if is_size(node) for each in node.args if type(each) is int and each > LARGEST_SHOWN}
    for size in sorted(size for size in sizes if size**2 * probe.num_heads <= MOST_BIAS_ELEMENTS):
        try:
            probe.run((size,), None, seed=0)
        except ProbeFailed:
            continue
        try:
            probe.run((size + 1,), None, seed=0)
        except ProbeFailed:
            return size
    return 0


def _table_limit(probe: MaskProbe) -> int:
    """The number of tokens that the mask's tables cover; afterwards its numbers are scaled to lengths above the probes'.

    Raises:
        ProbeFailed: the numbers are not lengths of tables.
    """
    probe.scales, probe.table_ends = LIMITS, []
    ends = set()
    for scale in probe.scales:
        images = probe.images(scale)
        shortest, literal = min(images.values(), default=0), min(images, default=0)
        seen = probe.run((shortest,), scale, seed=0)
        longest = shortest
        try:
            for longest in range(shortest, shortest + 4):
                seen = _longer(probe, probe.run((longest + 1,), scale, seed=0), seen)
        except ProbeFailed:
            ends.add(literal + longest - shortest)
            probe.table_ends.append(longest)
    if len(ends) != 1 or max(images.values()) - shortest > 2:
        raise ProbeFailed(f"{probe.where}: its mask cannot be made for small probes, and none of its numbers {probe.literals} says why")
    probe.table_length = ends.pop()
    return probe.table_length


def _longer(probe: MaskProbe, seen: Seen, before: Seen) -> Seen:
    """What was seen with one token more; ProbeFailed if earlier tokens see something else (a slice that begins at -1 has one column)."""
    inside = before.visible
    shorter = seen.visible[: len(inside), : len(inside)]
    same = np.array_equal(inside, shorter) and (before.bias is None or seen.bias is not None)
    if not same:
        raise ProbeFailed(f"{probe.where}: its mask is another one on {len(seen.visible)} tokens than on {len(inside)}")
    return seen


def _prove(probe: MaskProbe, max_positions: int | None) -> MaskProof:
    found: list[MaskFamily] = []
    heads = probe.num_heads
    for length, scale in zip(_match_lengths(probe), probe.scales, strict=True):
        seen = probe.run((length,), scale, seed=length)
        mask, heads = seen.visible, max(heads, 1 if seen.bias is None else len(seen.bias))
        family = match_family(mask)
        if family is None:
            raise unproved(probe.where, mask, f"it matches no known family on {length} tokens")
        found.append(family)
    family = _unscale(probe, found)
    direct = probe.run((_direct_length(probe, family, max_positions, heads),), None, seed=0)
    _explain_numbers(probe, family, direct)
    _check(probe, found, family, direct.visible)
    if direct.bias is None:
        _check_no_bias(probe, direct)
    bias, tabulated = (None, None) if direct.bias is None else _prove_bias(probe, direct.visible, direct.bias, max_positions)
    count = len(MATCH_LENGTHS) + len(CHECK_LENGTHS) + len(PACKINGS) + 1  # plus the unscaled one
    adds = f" + {bias.describe()}" if bias else ""
    evidence = f"mask evaluated on {count} probes = {family.describe()}{adds}; {len(probe.nodes)} nodes"
    return MaskProof(family, evidence, bias, min(filter(None, (tabulated, probe.table_length, probe.stored_end)), default=None))


def _match_lengths(probe: MaskProbe) -> tuple[int, ...]:
    """The lengths of the two matching probes: a table is probed over its whole length, or its scaled length if it is computed."""
    if probe.scales is LIMITS:
        return tuple(probe.table_ends)
    return tuple(probe.table_length - extra for extra in range(len(MATCH_LENGTHS))) if probe.table_length else MATCH_LENGTHS


def _unscale(probe: MaskProbe, found: list[MaskFamily]) -> MaskFamily:
    """The family in the model's own numbers: each limit is a small literal, or a large one (plus or minus one) found at both scales."""
    first, second = found
    if first.causal != second.causal:
        raise _unexplained(probe, "it is causal on only one of two probes")

    def limit(name: str) -> int | None:
        a, b = getattr(first, name), getattr(second, name)
        if (own := probe.unscaled(a, b)) is None and a is not b:
            raise _unexplained(probe, f"its {name} is {a} and {b} on two probes, which no number in it explains")
        return own

    return MaskFamily(first.causal, limit("window"), limit("chunk"), limit("ahead"))


def _direct_length(probe: MaskProbe, family: MaskFamily, max_positions: int | None, heads: int) -> int:
    """`heads`: number of heads between which mask or bias differ."""
    longest = min(DIRECT_LIMIT, math.isqrt(MOST_DIRECT_ELEMENTS // probe.num_heads))
    length = max((limit + 97 for limit in family.limits if limit + 97 <= longest), default=0)
    if probe.longest_table > DIRECT_LENGTH:
        most = MOST_BIAS_ELEMENTS if heads == 1 else MOST_DIRECT_ELEMENTS
        length = max(length, min(probe.longest_table, math.isqrt(most // heads)))
    ends = [end for end in (probe.table_length, probe.stored_end, probe.form.max_tokens, max_positions) if end]
    return min([max(length, DIRECT_LENGTH), *ends])


def _explain_numbers(probe: MaskProbe, family: MaskFamily, direct: Seen) -> None:
    """Every large number in the mask must be its window or chunk (within 2): small probes may not show any other effect.

    The numbers of a bias (T5's 128, ALiBi's 1/256) are covered by the direct probe, which is more than twice as long.
    """
    limits = family.limits
    shown = len(direct.visible) // 2 if direct.bias is not None else 0
    limits += probe.literals if probe.scales is LIMITS else []
    unexplained = [literal for literal in probe.literals if literal > shown and not any(abs(limit - literal) <= 2 for limit in limits)]
    if strange := [f"{literal}" for literal in unexplained] + probe.hidden(max(shown, LARGEST_SHOWN)):
        holds = f"its graph holds {', '.join(strange)}, which they cannot show to be harmless"
        raise _unexplained(probe, f"small probes say {family.describe()}, but {holds}")


def _check(probe: MaskProbe, found: list[MaskFamily], family: MaskFamily, direct: BoolMatrix) -> None:
    checks: tuple[int, ...] = CHECK_LENGTHS
    packings: tuple[tuple[int, ...], ...] = PACKINGS
    if 0 < probe.table_length < max(CHECK_LENGTHS) and probe.scales is not LIMITS:
        checks = (probe.table_length // 2 + 1, probe.table_length)
        packings = tuple(tuple(max(1, n * probe.table_length // 72) for n in packing) for packing in PACKINGS)
    for scaled, scale, length, packing in zip(found, probe.scales, checks, packings, strict=True):
        mask = probe.run((length,), scale, seed=length).visible
        if not np.array_equal(scaled.matrix(length), mask):
            raise unproved(probe.where, mask, f"it is {scaled.describe()} on one probe but not on {length} tokens")
        mask = probe.run(packing, scale, seed=length + 1).visible
        if not any(np.array_equal(variant, mask) for variant in packed_variants(scaled, packing).values()):
            packed = f"packed sequences {packing} see each other in a way that no rule explains"
            raise unproved(probe.where, mask, f"it is {scaled.describe()} for one sequence, but {packed}")
    if not np.array_equal(family.matrix(len(direct)), direct):
        raise unproved(probe.where, direct, f"small probes say {family.describe()}, but the mask of {len(direct)} tokens is another")


def _prove_bias(probe: MaskProbe, visible: BoolMatrix, bias: FloatArray, max_positions: int | None) -> tuple[BiasFamily, int | None]:
    """The family of the bias added to the scores, for as many positions as the model has, and for how many tokens it is known: None, if
    for all."""
    family = match_bias(bias, visible)
    if family is None:
        raise _unknown_bias(probe, visible, bias, "matches no known family")
    end = None
    if family.table is not None and not (_saturates(family) and _stays(probe, family, len(visible), max_positions)):
        length = min(max_positions or LONGEST_BIAS, probe.table_length or LONGEST_BIAS, math.isqrt(MOST_BIAS_ELEMENTS // bias.shape[0]))
        longer = probe.run((max(length, len(visible)),), None, seed=0)
        assert longer.bias is not None
        family = match_bias(longer.bias, longer.visible)
        if family is None:
            raise _unknown_bias(probe, visible, bias, f"is of another kind on {length} tokens than on {len(visible)}")
        end = None if family.table is None else family.table.shape[1]
    for length in (min(n, probe.table_length or n) for n in CHECK_LENGTHS):
        seen = probe.run((length,), None, seed=length)
        if not equals_bias(family, seen.bias if seen.bias is not None else np.zeros((1, length, length)), seen.visible):
            raise _unknown_bias(probe, visible, bias, f"is {family.describe()} on {len(visible)} tokens but not on {length}")
    return family, end


def _check_no_bias(probe: MaskProbe, direct: Seen) -> None:
    """Nothing was added to the scores of one long call: nor may there be to those of shorter ones."""
    for length in (min(n, probe.table_length or n) for n in CHECK_LENGTHS):
        seen = probe.run((length,), None, seed=length)
        if seen.bias is not None:
            raise _unknown_bias(probe, seen.visible, seen.bias, f"is there on {length} tokens but not on {len(direct.visible)}")


def _saturates(family: BiasFamily) -> bool:
    """Whether a table over distances is constant over its second half."""
    assert family.table is not None
    half = family.table.shape[1] // 2
    return family.index == "distance" and bool((family.table[:, half:] == family.table[:, half : half + 1]).all())


def _stays(probe: MaskProbe, family: BiasFamily, seen: int, max_positions: int | None) -> bool:
    """Whether a table over distances that saturates has its last value also at larger distances: buckets that grow with the logarithm of
    the distance may be as wide as all that was seen."""
    assert family.table is not None
    most = math.isqrt(MOST_SATURATED_ELEMENTS // family.num_heads)
    length = min(max_positions or LONGEST_BIAS, probe.table_length or LONGEST_BIAS, DIRECT_LIMIT, most)
    if length <= seen:
        return True
    longer = probe.run((length,), None, seed=0)
    table = np.pad(family.table, ((0, 0), (0, length - family.table.shape[1])), mode="edge")
    return longer.bias is not None and equals_bias(replace(family, table=table), longer.bias, longer.visible)


def _unknown_bias(probe: MaskProbe, visible: BoolMatrix, bias: FloatArray, why: str) -> UnsupportedError:
    low, high = bias[:, visible].min(), bias[:, visible].max()
    return UnsupportedError(
        f"{probe.where}: its additive mask holds values besides 0 and -inf (from {low:g} to {high:g}), a bias that {why}. "
        "Known are ALiBi and biases that depend only on the distance or only on the key's position. "
        f"What it leaves visible (query = line, key = column):\n{draw(visible)}"
    )


def _unexplained(probe: MaskProbe, why: str) -> UnsupportedError:
    return unproved(probe.where, probe.run(MATCH_LENGTHS[:1], probe.scales[0], 0).visible, why)


def unproved(where: str, mask: BoolMatrix, why: str) -> UnsupportedError:
    """The error for an unproved mask; it prints the mask."""
    return UnsupportedError(
        f"{where}: its attention mask cannot be proved: {why}. Its first rows (query = line, key = column):\n{draw(mask)}\n"
        "Known families: causal, sliding window, chunk, their intersections, and bidirectional, with a window or without. "
        "Run this model without paged_attn, or report it."
    )
