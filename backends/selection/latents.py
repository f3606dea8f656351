"""Whether a model that keeps latents would find a backend: asked before its graph is rewritten."""

from __future__ import annotations

import torch

from paged_attn.backends.attention.capabilities import PHASES, Capabilities, Feature
from paged_attn.backends.devices import architecture_of, device_word
from paged_attn.backends.needs import wrong_device
from paged_attn.backends.selection.packages import unmet_requirements
from paged_attn.backends.selection.ranking import row_for
from paged_attn.backends.selection.registry import backend_class
from paged_attn.backends.selection.select import split_name

EVERYWHERE = "torch_native"  # runs on any device, and slowly on a GPU


def serves_latents(name: str, device: torch.device) -> bool:
    """Whether `backend=name` runs latent attention on a device: every part of the name can; of "auto" one that a CPU takes, or one with
    kernels for the GPU whose packages are there.

    Raises:
        ValueError: as `select` does for a name.
    """
    if name != "auto":
        return all(Feature.MLA in backend_class(part).capabilities.features for part in split_name(name))
    word = device_word(device)
    architecture = architecture_of(device)
    names = [each for each in row_for(word, architecture).latents if word.startswith("cpu") or each != EVERYWHERE]
    return any(_able(backend_class(each).capabilities, word, architecture) for each in names)


def _able(capabilities: Capabilities, word: str, architecture: int | None) -> bool:
    """In all steps: a model that is left with a backend for decode alone finds none."""
    return (
        Feature.MLA in capabilities.features
        and capabilities.phases == PHASES
        and not wrong_device(capabilities, word, architecture)
        and not unmet_requirements(capabilities.requirements)
    )
