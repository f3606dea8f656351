"""Backends for other hardware: known, true, refused everywhere, and never picked by "auto"."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.capabilities import Problem, unmet
from paged_attn.backends.selection.ranking import ROWS
from paged_attn.backends.selection.registry import UNSUPPORTED, backend_class
from paged_attn.backends.selection.select import select
from tests.backends.fake_backends import SPEC, Machine, machine
from tests.backends.problems import make

__all__ = ["machine"]

# Where SGLang's documentation says that they run, and a layer and page size that they take there.
AT_HOME = {
    "fa4": ("cuda", 100, SPEC, 128),
    "dual_chunk_flash_attn": ("cuda", 90, SPEC, 16),
    "aiter": ("hip", None, SPEC, 16),
    "wave": ("hip", None, SPEC, 16),
    "ascend": ("npu", None, SPEC, 128),
    "intel_amx": ("cpu-amx", None, SPEC, 16),
    "intel_xpu": ("xpu", None, SPEC, 64),
}


def problem(device: str, architecture: int | None, spec: AttentionSpec = SPEC, page_size: int = 16) -> Problem:
    return Problem(spec, torch.bfloat16, torch.bfloat16, page_size, device, architecture)


def test_every_one_is_looked_at_here():
    assert set(AT_HOME) == set(UNSUPPORTED)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_at_home_only_the_missing_kernel_call_is_in_the_way(name):
    device, architecture, spec, page_size = AT_HOME[name]
    cls = backend_class(name)
    assert cls.name == name
    asked = dataclasses.replace(problem(device, architecture, spec, page_size), phases=cls.capabilities.phases)
    (why,) = unmet(cls.capabilities, asked)
    assert why.startswith("this project has no tested kernel call for it yet: use ")


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize(
    "place", [("cuda", 75), ("cuda", 90), ("cuda", 100), ("cpu", None), ("cpu-amx", None), ("hip", None), ("npu", None)]
)
def test_elsewhere_the_device_is_the_reason_that_comes_first(name, place):
    device = AT_HOME[name][0]
    capabilities = backend_class(name).capabilities
    reasons = unmet(capabilities, problem(*place))
    assert reasons, "it is never empty"
    if place[0] != device:
        assert reasons[0] == f"runs on {device}, not on {place[0]}"
    elif capabilities.architectures and place[1] not in capabilities.architectures:
        assert reasons[0].startswith("needs SM") and reasons[0].endswith(f"this GPU is SM{place[1]}")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_it_is_in_no_order(name):
    assert not any(name in (*row.names, *row.by_name_only) for row in ROWS)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_making_one_says_why_and_what_to_use(name):
    with pytest.raises(UnsupportedError, match=rf"attention backend '{name}' \(for .*\) is known but cannot run: this project .*: use .*"):
        backend_class(name)()
    bare = object.__new__(backend_class(name))
    for call in (lambda: bare.plan(None, None), lambda: bare.write_kv(None, None), lambda: bare.forward_extend(None, None),
                 lambda: bare.forward_decode(None, None)):  # fmt: skip
        with pytest.raises(UnsupportedError, match="is known but cannot run"):
            call()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_auto_never_takes_one_even_where_all_else_is_missing(machine: Machine, name):
    device, architecture, spec, page_size = AT_HOME[name]
    machine.device(device, architecture)
    for other in list(machine.entries):
        if other not in UNSUPPORTED:
            machine.put(other, devices=frozenset())
    with pytest.raises(UnsupportedError, match=rf"  {name}: (serves decode, not extend; )?this project has no tested kernel call"):
        machine.take(spec=spec, page_size=page_size)


def test_by_name_on_this_machine():
    layers = make([(0, 2)]).pool.layers
    with pytest.raises(UnsupportedError) as error:
        select("fa4", layers, torch.float32, torch.float32, 16, torch.device("cpu"))
    text = str(error.value)
    assert "\n  fa4: runs on cuda, not on cpu" in text and "pip install" not in text  # no package would help
    assert "What fits: torch_native, " in text or ", torch_native" in text
