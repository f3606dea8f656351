"""Whether a model that keeps latents would find a backend: asked before its graph is rewritten."""

from __future__ import annotations

import torch

from paged_attn.backends.attention.capabilities import Feature
from paged_attn.backends.devices import architecture_of, device_word
from paged_attn.backends.selection.packages import unmet_requirement
from paged_attn.backends.selection.ranking import row_for
from paged_attn.backends.selection.registry import backend_class
from paged_attn.backends.selection.select import split_name

EVERYWHERE = frozenset({"torch_native", "flex"})  # run on any device, and slowly on a GPU
NOT_MEASURED = frozenset({"triton"})  # their latent kernels are taken by name alone, until a GPU has shown that they are faster


def serves_latents(name: str, device: torch.device) -> bool:
    """Whether `backend=name` runs latent attention on a device: every part of the name can; of "auto" the one that a CPU takes, or one with
    measured kernels for the GPU whose packages are there. No backend has those yet.

    Raises:
        ValueError: as `select` does for a name.
    """
    if name != "auto":
        return all(Feature.MLA in backend_class(part).capabilities.features for part in split_name(name))
    return any(each not in NOT_MEASURED or device.type == "cpu" for each in _able(device))


def left_to_names(name: str, device: torch.device) -> str:
    """A line for people where `backend=name` is "auto" and leaves a backend for latents aside because it was not measured; "" elsewhere."""
    if name != "auto" or serves_latents(name, device) or not (able := _able(device)):
        return ""
    return (
        f"expanded: 'auto' asks for no kernel of latents on this device until one is measured there; backend={able[0]!r} keeps one row per "
        "token in place of keys and values, wherever that is proved"
    )


def _able(device: torch.device) -> list[str]:
    """Backends of "auto" that run latent attention on a device, best first: any on a CPU, those with kernels for it on a GPU."""
    word = device_word(device)
    names = [each for each in row_for(word, architecture_of(device)).names if word.startswith("cpu") or each not in EVERYWHERE]
    able = []
    for each in names:
        capabilities = backend_class(each).capabilities
        needed = [unmet_requirement(requirement) for requirement in capabilities.requirements]
        if Feature.MLA in capabilities.features and capabilities.runs_on(word) and not any(needed):
            able.append(each)
    return able
