"""Selects the backend that runs a model: one function for "auto", for a name, and for two names (prefill, decode)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.capabilities import PHASES, Capabilities, Feature
from paged_attn.backends.attention.hybrid import DECODE, EXTEND, NOT_DETERMINISTIC, hybrid_of
from paged_attn.backends.devices import architecture_of, device_word
from paged_attn.backends.needs import wrong_device
from paged_attn.backends.selection.packages import unmet_requirements
from paged_attn.backends.selection.ranking import Order, row_for
from paged_attn.backends.selection.registry import UNSUPPORTED, backend_class, backend_names, loadable_classes
from paged_attn.backends.selection.requirements import Requirements

logger = logging.getLogger("paged_attn")
EVERYWHERE = "torch_native"  # runs on any device, and slowly on a GPU


@dataclass(frozen=True)
class Selection:
    """The selected backend, why it was selected, and why the others were not."""

    backend: AttentionBackend
    reason: str
    rejected: dict[str, str]

    def describe(self) -> str:
        """One line that groups names with the same reason and omits backends that this project cannot run anywhere."""
        groups: dict[str, list[str]] = {}
        for name, why in self.rejected.items():
            if name not in UNSUPPORTED:
                groups.setdefault(why, []).append(name)
        others = "; ".join(f"{', '.join(names)}: {why}" for why, names in groups.items())
        return f"{self.backend.name} ({self.reason})" + (f"; not taken: {others}" if others else "")


def select(name: str, required: Requirements) -> Selection:
    """Selects the best backend that can run every layer; for "auto" possibly one for prefill and another for decode.

    Args:
        name: "auto", a registered name, or two as "fa3,flashinfer": prefill, decode.

    Raises:
        ValueError: `name` does not have that form, or is not registered.
        UnsupportedError: the named backend, or every backend, cannot run some layer; the message has every reason.
    """
    selection = _automatic(required) if name == "auto" else _by_name(required, name)
    logger.info("attention backend: %s", selection.describe())
    return selection


def select_for_pool(name: str, pool: KVPool, dtype: torch.dtype | None = None, *, deterministic: bool = False) -> Selection:
    """`select` for the layers, page size, KV dtype and device of a pool; `dtype` is the model's (the pool's if None)."""
    where = (dtype or pool.dtype, pool.dtype, pool.page_size, pool.device)
    return select(name, Requirements.of(pool.layers, *where, deterministic=deterministic))


def pick(required: Requirements, order: Order, broken: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The choice for "auto", one name, two (prefill, decode), or none; and why those earlier in the order do not fit.

    Args:
        broken: names to leave out -> why.
    """
    rejected = dict(broken)
    if required.deterministic:  # two backends would not be batch-invariant
        picked = [_first(required, order.decode, PHASES, broken, rejected)]
    else:
        picked = [_first(required, order.extend, EXTEND, broken, rejected), _first(required, order.decode, DECODE, broken, rejected)]
    names = [name for name in dict.fromkeys(picked) if name is not None]
    if None in picked:
        return [], {name: rejected.get(name, "the other phase has none") for name in (*rejected, *names)}
    return names, {name: why for name, why in rejected.items() if name not in names}


def why_picked(order: Order, names: Sequence[str]) -> str:
    """The reason for the choice of `pick`, as part of a sentence."""
    why = order.why if not order.fallback or set(names) & set(order.notes) else f"{order.fallback}; nothing that was measured fits"
    if len(names) == 1:
        return f"first that fits every layer in {why}"
    return f"{names[0]} for prefill and {names[1]} for decode: the first that fit every layer in {why}"


def _automatic(required: Requirements) -> Selection:
    order, broken = required.order(), dict[str, str]()
    while True:
        names, rejected = pick(required, order, broken)
        others = [name for name in backend_names() if name not in rejected and name not in names]
        if not names:
            raise _refusal(required, "auto", rejected | required.left_out(others, order, None))
        made, failed = make_backends(names, required.deterministic)
        if not failed:
            backend = _joined(made)
            return Selection(backend, why_picked(order, names), rejected | required.left_out(others, order, backend.name))
        logger.warning("an attention backend is left out: %s", "; ".join(f"{name}: {why}" for name, why in failed.items()))
        broken |= failed


def _first(
    required: Requirements, names: Sequence[str], phases: frozenset[str], broken: Mapping[str, str], rejected: dict[str, str]
) -> str | None:
    """The first backend that fits in these phases; adds to `rejected` why those before it do not."""
    for name in names:
        if name in broken:
            continue
        reasons = required.reasons(name, phases)
        if not reasons:
            return name
        rejected[name] = "; ".join(reasons)
    return None


def _by_name(required: Requirements, name: str) -> Selection:
    names = split_name(name)
    single = len(names) == 1
    phases = [PHASES] if single else [EXTEND, DECODE]
    roles = [""] if single else [" (prefill)", " (decode)"]
    against = {part + role: "; ".join(required.reasons(part, asked)) for part, role, asked in zip(names, roles, phases, strict=True)}
    against = {part: why for part, why in against.items() if why}
    if required.deterministic and not single:
        against[name] = NOT_DETERMINISTIC
    made, failed = make_backends([] if against else names, required.deterministic)
    if against | failed:
        raise _refusal(required, name, against | failed)
    backend = _joined(made)
    others = [other for other in backend_names() if other not in names]
    return Selection(backend, "asked for by name", dict.fromkeys(others, "asked for another by name"))


def split_name(name: str) -> list[str]:
    """`"fa3"` or `"fa3,flashinfer"` as one or two registered names.

    Raises:
        ValueError: another form, or an unregistered name.
    """
    names = [part.strip() for part in name.split(",")]
    if len(names) > 1 and (len(names) > 2 or names[0] == names[1] or "auto" in names or "" in names):
        raise ValueError(
            f"backend is {name!r}; allowed are 'auto', one name, or two different names as 'fa3,flashinfer': prefill, decode "
            f"('auto' is not one of two); known names are {', '.join(backend_names())}"
        )
    for part in names:
        if part not in backend_names():
            backend_class(part)  # raises, and lists the known names
    return names


def make_backends(names: Sequence[str], deterministic: bool) -> tuple[dict[str, AttentionBackend], dict[str, str]]:
    """The backends by name, and why some cannot be created: their package does not work on this machine (an ABI, a driver, a library)."""
    made, failed = dict[str, AttentionBackend](), dict[str, str]()
    for name in names:
        try:
            made[name] = backend_class(name)(deterministic=deterministic)
        except (ImportError, OSError) as error:
            failed[name] = f"it fits, but cannot be loaded: {error}"
    return made, failed


def _joined(made: Mapping[str, AttentionBackend]) -> AttentionBackend:
    backends = list(made.values())
    return backends[0] if len(backends) == 1 else hybrid_of(*backends)


def _refusal(required: Requirements, name: str, against: Mapping[str, str]) -> UnsupportedError:
    listed = "\n".join(f"  {backend}: {why}" for backend, why in against.items())
    asked = " and deterministic=True" if required.deterministic else ""
    if fits := required.fitting():
        hint = f"What fits{', with batch-invariant results' if required.deterministic else ''}: {', '.join(fits)}. Try backend='auto' or"
    elif required.deterministic:
        able = [each for each, cls in loadable_classes().items() if Feature.DETERMINISTIC in cls.capabilities.features]
        hint = f"Batch-invariant are {', '.join(able) or 'none'}, which do not fit otherwise. Leave deterministic off, or"
    else:
        hint = "Nothing fits in both phases. Change what the reasons name, or"
    if required.keeps_latents:
        hint = f"With disable_passes=('latent_attention',) keys and values of all heads are kept instead of latents. {hint}"
    what = f"no attention backend for this model with backend={name!r}{asked}"
    return UnsupportedError(f"{what}:\n{listed}\n{hint} see `paged-attn backends`.")


def serves_latents(name: str, device: torch.device) -> bool:
    """Whether `backend=name` can run latent attention on a device; used before a graph is rewritten. Every part of the name must; for
    "auto", a backend for latents in the device's ranking must be usable, on a GPU one with kernels for it.

    Raises:
        ValueError: as `select` for a name.
    """
    if name != "auto":
        return all(Feature.MLA in backend_class(part).capabilities.features for part in split_name(name))
    word = device_word(device)
    architecture = architecture_of(device)
    names = [each for each in row_for(word, architecture).latents if word.startswith("cpu") or each != EVERYWHERE]
    return any(_able(backend_class(each).capabilities, word, architecture) for each in names)


def _able(capabilities: Capabilities, word: str, architecture: int | None) -> bool:
    """Whether it runs latents in all phases: a model with a backend only for decode would find none."""
    return (
        Feature.MLA in capabilities.features
        and capabilities.phases == PHASES
        and not wrong_device(capabilities, word, architecture)
        and not unmet_requirements(capabilities.requirements)
    )
