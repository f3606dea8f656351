"""Whether a model that keeps latents would find a backend: asked before its graph is rewritten."""

from __future__ import annotations

import torch

from paged_attn.backends.attention.capabilities import Capabilities, Feature
from paged_attn.backends.devices import architecture_of, device_word
from paged_attn.backends.selection.packages import unmet_requirement
from paged_attn.backends.selection.ranking import row_for
from paged_attn.backends.selection.registry import backend_class
from paged_attn.backends.selection.select import split_name

EVERYWHERE = frozenset({"torch_native", "flex"})  # run on any device, and slowly on a GPU


def serves_latents(name: str, device: torch.device) -> bool:
    """Whether `backend=name` runs latent attention on a device: every part of the name can; of "auto" one that a CPU takes, or one with
    kernels for the GPU whose packages are there.

    Raises:
        ValueError: as `select` does for a name.
    """
    if name != "auto":
        return all(Feature.MLA in backend_class(part).capabilities.features for part in split_name(name))
    word = device_word(device)
    names = [each for each in row_for(word, architecture_of(device)).names if word.startswith("cpu") or each not in EVERYWHERE]
    return any(_able(backend_class(each).capabilities, word) for each in names)


def _able(capabilities: Capabilities, word: str) -> bool:
    missing = any(unmet_requirement(requirement) for requirement in capabilities.requirements)
    return Feature.MLA in capabilities.features and capabilities.runs_on(word) and not missing
