"""The key of a compiled piece on disk: a hash of everything that affects the compiler's result."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch

_HOOKS = (
    "pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass", "_post_fusion_custom_pass", "custom_partitioner_fn",
)  # fmt: skip
_PACKAGE = Path(__file__).parents[2]  # folder of paged_attn; in a checkout its links lead to the other folders


def artifact_key(fingerprint: str) -> str | None:
    """The name of a piece's entry; None while the user has custom Inductor passes, because no text describes those completely."""
    from torch._inductor import config

    if any(getattr(config, name, None) is not None for name in _HOOKS):
        return None
    facts = [fingerprint, source_digest("capture", "passes", "attn_ops"), _versions(), *_devices(), *settings_text()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


@functools.cache
def _versions() -> str:
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    torches = (torch.__version__, torch.version.git_version, torch.version.cuda, torch.version.hip)
    return f"python {sys.version_info[:2]} torch {torches} triton {triton}"


def _devices() -> list[str]:
    names = [f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        names.append(f"cuda {index} {device.name} {device.major}.{device.minor} {device.multi_processor_count}")
    return names


def settings_text() -> list[str]:
    """Settings that the compiler reads, or whose value at compile time ends up in the compiled code."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    matmul = torch.backends.cuda.matmul
    lines = [
        f"default {torch.get_default_dtype()} {torch.get_default_device()}",
        f"deterministic {torch.are_deterministic_algorithms_enabled()}",
        f"matmul {torch.get_float32_matmul_precision()} {matmul.allow_tf32}",
        f"reduced {matmul.allow_fp16_reduced_precision_reduction} {matmul.allow_bf16_reduced_precision_reduction}",
        *(f"autocast {device} {torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}" for device in ("cpu", "cuda")),
    ]
    for config in (inductor_config, functorch_config):
        values = config.save_config_portable(ignore_private_configs=False)
        lines += [f"{config.__name__} {name}={values[name]!r}" for name in sorted(values)]
    return lines


@functools.cache
def source_digest(*rooms: str) -> str:
    """A hash of all Python files in these folders of paged_attn, at any depth; "" means the files directly in paged_attn."""
    digest = hashlib.sha256()
    for room in rooms:
        folder = (_PACKAGE / room).resolve()  # rglob does not follow links
        for path in sorted(folder.rglob("*.py") if room else folder.glob("*.py")):
            digest.update(f"{room}/{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()
