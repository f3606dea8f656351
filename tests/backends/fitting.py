"""Which registered backends say that they can run a case on a device, and one instance of each for all tests."""

from __future__ import annotations

from functools import cache

import torch

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.capabilities import Feature, Problem, unmet
from paged_attn.backends.devices import architecture_of, device_word
from paged_attn.backends.selection.packages import unmet_requirements
from paged_attn.backends.selection.registry import backend_class, backend_names
from tests.backends.problems import Case

JIT = frozenset({"flashinfer", "trtllm_mha", "trtllm_mla", "flex"})  # compile for many seconds, up to minutes, on first use


@cache
def instance(name: str, deterministic: bool = False) -> AttentionBackend:
    return backend_class(name)(deterministic=deterministic)


@cache
def missing_packages(name: str) -> tuple[str, ...]:
    return tuple(unmet_requirements(backend_class(name).capabilities.requirements))


def problem_of(case: Case, device: torch.device, *, lse: bool = False, extra: frozenset[Feature] = frozenset()) -> Problem:
    """What the case asks of a backend on a device, in the phase of its batch."""
    phases = frozenset({"decode" if case.batch.mode is ForwardMode.DECODE else "extend"})
    extra |= {Feature.LSE} if lse else frozenset()
    dtype, pool = case.query.dtype, case.pool
    return Problem(case.spec, dtype, pool.dtype, pool.page_size, device_word(device), architecture_of(device), extra, phases)


def reasons_against(name: str, problem: Problem) -> list[str]:
    """Missing packages and unmet needs; none means that the backend claims to give the reference's numbers."""
    return [*missing_packages(name), *unmet(backend_class(name).capabilities, problem)]


def usable_names(device: str) -> list[str]:
    """Registered backends that run at all on the machine's device of that kind, the oracle apart."""
    if device == "cuda" and not torch.cuda.is_available():
        return []
    word, architecture = device_word(torch.device(device)), architecture_of(torch.device(device))
    names = []
    for name in backend_names():
        capabilities = backend_class(name).capabilities
        right_gpu = not capabilities.architectures or architecture in capabilities.architectures
        if name != "reference" and capabilities.runs_on(word) and right_gpu and not missing_packages(name):
            names.append(name)
    return names
