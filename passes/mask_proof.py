"""From an evaluated mask to a proved family: matched on two probes, checked on others, or refused with the mask printed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.mask_family import BoolMatrix, MaskFamily, draw, match_family, packed_variants
from paged_attn.passes.mask_probe import SCALES, MaskProbe

MATCH_LENGTHS = (59, 67)
CHECK_LENGTHS = (41, 83)
PACKINGS = ((5, 26, 31), (1, 34, 9, 12))
DIRECT_LENGTH, DIRECT_LIMIT = 609, 2304  # a family is also checked on one unscaled mask, of more tokens if these suffice to show it


@dataclass(frozen=True)
class MaskProof:
    """A family, and the words that say how it was proved."""

    family: MaskFamily
    evidence: str


def prove(probe: MaskProbe) -> MaskProof:
    """Find the family of a traced mask.

    Raises:
        UnsupportedError: no family fits, or the two scales do not agree; the message holds the layer and the mask.
        CallNotPaged: the mask is made from an input of this call.
    """
    found: list[MaskFamily] = []
    for length, scale in zip(_match_lengths(probe), SCALES, strict=True):
        mask = probe.run((length,), scale, seed=length)
        family = match_family(mask)
        if family is None:
            raise unproved(probe.where, mask, f"it matches no known family on {length} tokens")
        found.append(family)
    family = _unscale(probe, found)
    _explain_numbers(probe, family)
    _check(probe, found, family)
    count = len(MATCH_LENGTHS) + len(CHECK_LENGTHS) + len(PACKINGS) + 1  # and the unscaled one
    return MaskProof(family, f"mask evaluated on {count} probes = {family.describe()}; {len(probe.nodes)} nodes")


def _match_lengths(probe: MaskProbe) -> tuple[int, ...]:
    return tuple(max(length, probe.table_length - extra) for extra, length in enumerate(MATCH_LENGTHS))


def _unscale(probe: MaskProbe, found: list[MaskFamily]) -> MaskFamily:
    """The family in the model's own numbers: each limit is a small literal, or a large one (plus or minus one) seen at both scales."""
    first, second = found
    if first.causal != second.causal:
        raise unproved(probe.where, probe.run(MATCH_LENGTHS[:1], SCALES[0], 0), "it is causal at one length and not at another")

    def limit(name: str) -> int | None:
        a, b = getattr(first, name), getattr(second, name)
        if a == b:
            return a  # type: ignore[no-any-return]
        images = [probe.images(scale) for scale in SCALES]
        fits = {literal + d for literal in probe.literals for d in (-1, 0, 1) if (images[0][literal] + d, images[1][literal] + d) == (a, b)}
        if len(fits) != 1:
            raise unproved(
                probe.where,
                probe.run(MATCH_LENGTHS[:1], SCALES[0], 0),
                f"its {name} is {a} and {b} on two probes, which no number in it explains",
            )
        return fits.pop()

    return MaskFamily(first.causal, limit("window"), limit("chunk"))


def _explain_numbers(probe: MaskProbe, family: MaskFamily) -> None:
    """Every large number in the mask must be its window or its chunk (or within 2 of it): what else it does, small probes may not show."""
    limits = [limit for limit in (family.window, family.chunk) if limit is not None]
    strange = [f"{literal}" for literal in probe.literals if not any(abs(limit - literal) <= 2 for limit in limits)] + probe.hidden
    if strange:
        mask = probe.run(MATCH_LENGTHS[:1], SCALES[0], 0)
        raise unproved(
            probe.where,
            mask,
            f"small probes say {family.describe()}, but its graph holds {', '.join(strange)}, which they can not show to be harmless",
        )


def _check(probe: MaskProbe, found: list[MaskFamily], family: MaskFamily) -> None:
    for scaled, scale, length, packing in zip(found, SCALES, CHECK_LENGTHS, PACKINGS, strict=True):
        mask = probe.run((length,), scale, seed=length)
        if not np.array_equal(scaled.matrix(length), mask):
            raise unproved(probe.where, mask, f"it is {scaled.describe()} on one probe but not on {length} tokens")
        mask = probe.run(packing, scale, seed=length + 1)
        if not any(np.array_equal(variant, mask) for variant in packed_variants(scaled, packing).values()):
            raise unproved(
                probe.where,
                mask,
                f"it is {scaled.describe()} for one sequence, but packed sequences {packing} see each other in a way no rule explains",
            )
    length = max((limit + 97 for limit in (family.window, family.chunk) if limit is not None and limit + 97 <= DIRECT_LIMIT), default=0)
    length = min(max(length, DIRECT_LENGTH), probe.table_length or DIRECT_LIMIT)
    mask = probe.run((length,), None, seed=0)
    if not np.array_equal(family.matrix(length), mask):
        raise unproved(probe.where, mask, f"small probes say {family.describe()}, but the mask of {length} tokens is another")


def unproved(where: str, mask: BoolMatrix, why: str) -> UnsupportedError:
    """The error for a mask that no proof covers; it prints the mask."""
    return UnsupportedError(
        f"{where}: its attention mask can not be proved: {why}. Its first rows (query = line, key = column):\n{draw(mask)}\n"
        "Known families: causal, sliding window, chunk, their intersections, and bidirectional. Run this model uncompiled, or report it."
    )
