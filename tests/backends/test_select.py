"""Selection: "auto" and a name go one way; reasons are given for what was not taken, and for failing."""

import dataclasses
import logging

import pytest
import torch

import paged_attn
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv_pool import KVPool
from paged_attn.attn_ops.spec import AttentionSpec
from paged_attn.backends import select as select_module
from paged_attn.backends.capabilities import Requirement, Span
from paged_attn.backends.reference import ReferenceBackend
from paged_attn.backends.select import reasons_against, select, select_for_pool
from paged_attn.backends.torch_native import TorchNativeBackend

LAYERS = [
    AttentionSpec(4, 2, 8, 8, 0.5, kv_layer=0, module="layers.0"),
    AttentionSpec(4, 2, 8, 8, 0.5, kv_layer=1, softcap=30.0, module="layers.1"),
]
CPU = torch.device("cpu")


def choose(name: str, layers=LAYERS, dtype=torch.float32, kv_dtype=torch.float32, page_size=16, device=CPU):
    return select(name, layers, dtype, kv_dtype, page_size, device)


def limit(monkeypatch, backend, **capabilities):
    monkeypatch.setattr(backend, "capabilities", dataclasses.replace(backend.capabilities, **capabilities))


def test_auto_takes_the_first_that_fits():
    selection = choose("auto")
    assert type(selection.backend) is TorchNativeBackend
    assert selection.reason == "first in order of preference that fits every layer"
    assert selection.rejected == {"reference": "ranked after torch_native"}


@pytest.mark.parametrize("cls", [TorchNativeBackend, ReferenceBackend])
def test_a_name_takes_that_one(cls):
    selection = choose(cls.name)
    assert type(selection.backend) is cls
    assert selection.reason == "asked for by name"
    assert list(selection.rejected.values()) == ["asked for another by name"]


def test_auto_skips_what_can_not_run_some_layer(monkeypatch):
    limit(monkeypatch, TorchNativeBackend, features=frozenset())
    selection = choose("auto")
    assert type(selection.backend) is ReferenceBackend
    assert selection.rejected == {"torch_native": "no softcap [layer 1 (layers.1)]"}


def test_auto_and_a_name_meet_the_same_reasons(monkeypatch):
    """One path: what "auto" says of a backend is what asking for it by name fails with."""
    limit(monkeypatch, TorchNativeBackend, features=frozenset(), page_sizes=Span(64, 64))
    why = choose("auto").rejected["torch_native"]
    with pytest.raises(UnsupportedError) as error:
        choose("torch_native")
    assert f"  torch_native: {why}" in str(error.value)
    assert "page size 16 is not in 64 to 64 [layer 0 (layers.0)]" in why and "no softcap [layer 1 (layers.1)]" in why
    assert "backend='torch_native'" in str(error.value) and "Try backend='auto'" in str(error.value)


def test_the_reasons_are_unmets_own(monkeypatch):
    calls = []

    def counted(capabilities, problem):
        calls.append(problem)
        return ["made up"]

    monkeypatch.setattr(select_module, "unmet", counted)
    for name, count in (("auto", 4), ("torch_native", 2)):
        calls.clear()
        with pytest.raises(UnsupportedError, match="made up"):
            choose(name)
        assert len(calls) == count
        assert [p.spec for p in calls[:2]] == LAYERS


def test_auto_that_fits_nothing_lists_every_backend():
    with pytest.raises(UnsupportedError) as error:
        choose("auto", kv_dtype=torch.int8)
    for name in ("torch_native", "reference"):
        assert f"  {name}: KV dtype int8 is not among bfloat16, float16, float32, float64 [layer 0 (layers.0)]" in str(error.value)


def test_a_reason_that_layers_share_is_named_once(monkeypatch):
    limit(monkeypatch, TorchNativeBackend, head_dims=Span(64, 64))
    why = choose("auto").rejected["torch_native"]
    assert why.count("head dim 8 is") == 1 and "layers.1" not in why


@pytest.mark.parametrize("name", ["fa9", "", "AUTO"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=f"unknown attention backend '{name}'; known are 'auto' and .*'torch_native'.*'reference'"):
        choose(name)


def test_a_missing_package_gives_the_install_line(monkeypatch):
    needs = Requirement("no_such_kernel_package", "0.6.8", "pip install no-such-kernel-package")
    limit(monkeypatch, TorchNativeBackend, requirements=(needs,))
    why = "no_such_kernel_package 0.6.8 is not installed: pip install no-such-kernel-package"
    assert choose("auto").rejected["torch_native"] == why
    with pytest.raises(UnsupportedError, match=why):
        choose("torch_native")


def test_an_installed_package_is_no_reason(monkeypatch):
    limit(monkeypatch, TorchNativeBackend, requirements=(Requirement("numpy", "1.0", "pip install numpy"),))
    assert type(choose("auto").backend) is TorchNativeBackend


def test_no_problem_no_reason():
    assert reasons_against(TorchNativeBackend.capabilities, []) == []


def test_one_log_line_says_chosen_rejected_and_why(caplog, monkeypatch):
    limit(monkeypatch, TorchNativeBackend, features=frozenset())
    with caplog.at_level(logging.INFO, logger="paged_attn"):
        selection = choose("auto")
    assert [r.getMessage() for r in caplog.records] == [f"attention backend: {selection.describe()}"]
    assert selection.describe() == (
        "reference (first in order of preference that fits every layer); not taken: torch_native: no softcap [layer 1 (layers.1)]"
    )


def test_a_pools_properties_are_used(monkeypatch):
    pool = KVPool(LAYERS, 4, 16, torch.bfloat16)
    limit(monkeypatch, TorchNativeBackend, page_sizes=Span(1, 1), kv_dtypes=frozenset(), dtypes=frozenset())
    of_pool = select_for_pool("auto", pool).rejected["torch_native"]
    assert "page size 16" in of_pool and "KV dtype bfloat16" in of_pool and of_pool.startswith("dtype bfloat16")
    assert select_for_pool("auto", pool, torch.float32).rejected["torch_native"].startswith("dtype float32")


def test_forward_context_takes_a_name_or_an_object():
    pool = KVPool(LAYERS, 4, 16, torch.float32)
    batch = paged_attn.Batch.build([paged_attn.BatchRequest([1, 2], [1])], 16)
    assert type(paged_attn.forward_context(batch, pool).backend) is TorchNativeBackend
    assert type(paged_attn.forward_context(batch, pool, "reference").backend) is ReferenceBackend
    mine = ReferenceBackend()
    assert paged_attn.forward_context(batch, pool, mine).backend is mine
    with pytest.raises(ValueError, match="unknown attention backend 'x'"):
        paged_attn.forward_context(batch, pool, "x")
