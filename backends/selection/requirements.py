"""What a model requires of attention backends, and what rules out each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.capabilities import NO_LATENTS, PHASES, Capabilities, Feature, Problem, unmet
from paged_attn.backends.devices import architecture_of, device_name, device_word
from paged_attn.backends.needs import wrong_device
from paged_attn.backends.selection.packages import unmet_requirements
from paged_attn.backends.selection.ranking import Order, default_order, row_for
from paged_attn.backends.selection.registry import backend_class, backend_names, third_party_names
from paged_attn.backends.selection.tuned import tuned_order


@dataclass(frozen=True)
class Requirements:
    """The problems of all layers, and the settings; `device` is a word of `device_word`."""

    problems: tuple[Problem, ...]
    device: str
    architecture: int | None
    device_name: str
    deterministic: bool = False

    @classmethod
    def of(
        cls,
        layers: Sequence[AttentionSpec],
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        page_size: int,
        device: torch.device,
        *,
        deterministic: bool = False,
    ) -> Requirements:
        """deterministic: allow only batch-invariant backends."""
        word, architecture = device_word(device), architecture_of(device)
        extra = frozenset({Feature.DETERMINISTIC}) if deterministic else frozenset()
        problems = tuple(Problem(spec, dtype, kv_dtype, page_size, word, architecture, extra) for spec in layers)
        return cls(problems, word, architecture, device_name(device), deterministic)

    @property
    def keeps_latents(self) -> bool:
        """Whether any layer does."""
        return any(isinstance(problem.spec, LatentSpec) for problem in self.problems)

    def reasons(self, name: str, phases: frozenset[str] = PHASES) -> list[str]:
        """Every reason against a registered backend in these phases; empty if it fits."""
        try:
            capabilities = backend_class(name).capabilities
        except ImportError as error:
            return [f"its module cannot be imported: {error}"]
        return reasons_against(capabilities, [replace(problem, phases=phases) for problem in self.problems])

    def fitting(self) -> list[str]:
        """Registered names that fit in both phases."""
        return [name for name in backend_names() if not self.reasons(name)]

    def order(self) -> Order:
        """The measured order if there is one, then the default one; `why` names it, or says why measurements were not used."""
        usual = default_order(self.device, self.architecture, third_party_names(), latents=self.keeps_latents)
        measured, unused = tuned_order([problem for problem in self.problems if problem.spec.by_backend], self.device_name)
        if measured is None:
            return replace(usual, why=usual.why + (f"; {unused}" if unused else ""))
        return measured.only(backend_names()).followed_by(usual)

    def left_out(self, names: Iterable[str], order: Order, taken: str | None) -> dict[str, str]:
        """Why each of these was not taken: ranked after `taken`, taken by name only, or unfit."""
        by_name_only = row_for(self.device, self.architecture).by_name_only
        why = {}
        for name in names:
            if taken is not None and name in order.extend + order.decode:
                why[name] = f"ranked after {taken}" + (f", {order.notes[name]}" if name in order.notes else "")
            else:
                why[name] = "; ".join(self.reasons(name)) or f"by name only: {by_name_only.get(name, f'it is not in {order.why}')}"
        return why


def reasons_against(capabilities: Capabilities, problems: Sequence[Problem]) -> list[str]:
    """Every reason against a backend: missing packages and unmet needs. If it is only for latents and no layer keeps them, or the device is
    wrong, only that.

    A need of only some layers names the first of them.
    """
    asked = [(index, problem) for index, problem in enumerate(problems) if problem.spec.by_backend]
    if capabilities.latents_only and asked and not any(isinstance(problem.spec, LatentSpec) for _, problem in asked):
        return [NO_LATENTS]
    if wrong := {wrong_device(capabilities, problem.device, problem.architecture) for _, problem in asked} - {""}:
        return sorted(wrong)
    missing = unmet_requirements(capabilities.requirements)
    layers: dict[str, list[str]] = {}
    for index, problem in asked:
        for reason in unmet(capabilities, problem):
            layers.setdefault(reason, []).append(f"layer {index}" + (f" ({problem.spec.module})" if problem.spec.module else ""))
    return [*missing, *(reason if len(having) == len(asked) else f"{reason} [{_listed(having)}]" for reason, having in layers.items())]


def _listed(layers: Sequence[str]) -> str:
    return layers[0] + (f" and {len(layers) - 1} more" if len(layers) > 1 else "")
