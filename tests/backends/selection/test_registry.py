"""Backends through entry points: ours, a third party's, and two of one name."""

import sys
import types
from importlib.metadata import EntryPoint

import pytest
import torch

import paged_attn
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from paged_attn.backends.selection import registry
from paged_attn.backends.selection.ranking import ROWS, Order, default_order
from paged_attn.backends.selection.registry import (
    BUILT_IN,
    GROUP,
    UNSUPPORTED,
    backend_class,
    backend_names,
    loadable_classes,
    register_backend,
    third_party_names,
)
from paged_attn.backends.selection.requirements import Requirements
from paged_attn.backends.selection.select import select, select_for_pool
from tests.backends.problems import close, make, new_output

OURS = [EntryPoint(name, target, GROUP) for name, target in BUILT_IN.items()]


class ThirdParty(ReferenceBackend):
    name = "acme"


@pytest.fixture
def install(monkeypatch):
    """`install(entry, ...)`: what importlib.metadata then finds in the group; the registry's cache is emptied before and after."""
    module = types.ModuleType("acme_attention")
    module.Backend = ThirdParty
    monkeypatch.setitem(sys.modules, "acme_attention", module)

    def set_entries(*entries: EntryPoint) -> None:
        def found(*, group: str):
            assert group == "paged_attn.backends"
            return entries

        monkeypatch.setattr(registry, "entry_points", found)
        registry._entry_points.cache_clear()

    monkeypatch.setattr(registry, "_of_this_process", {})
    yield set_entries
    registry._entry_points.cache_clear()


def test_built_in_without_any_metadata(install):
    install()
    assert backend_names() == [*BUILT_IN]
    assert list(BUILT_IN)[-1] == "reference" and not set(BUILT_IN) & set(UNSUPPORTED)
    assert backend_class("torch_native") is TorchNativeBackend
    assert backend_class("reference") is ReferenceBackend


def test_a_third_partys_backend_is_ranked_before_the_oracle(install):
    install(*OURS, EntryPoint("zeta", "zeta:B", GROUP), EntryPoint("acme", "acme_attention:Backend", GROUP))
    names = backend_names()
    assert names == [*list(BUILT_IN)[:-1], "acme", "zeta", "reference"]
    assert third_party_names() == ["acme", "zeta"]
    assert default_order("cpu", None, third_party_names()).extend[-3:] == ("acme", "zeta", "reference")


def test_a_third_partys_backend_runs_by_name(install):
    install(*OURS, EntryPoint("acme", "acme_attention:Backend", GROUP))
    assert backend_class("acme") is ThirdParty
    case = make([(5, 2), (0, 3)])
    output = new_output(case)
    with paged_attn.forward_context(case.batch, case.pool, "acme") as context:
        assert type(context.backend) is ThirdParty
        UNIFIED_ATTENTION(case.query, case.key, case.value, output, 1, True)
    expected = new_output(case)
    with paged_attn.forward_context(case.batch, case.pool, "torch_native"):
        UNIFIED_ATTENTION(case.query, case.key, case.value, expected, 1, True)
    close(output, expected)


def test_a_third_partys_backend_is_taken_when_ours_can_not(install, monkeypatch):
    install(*OURS, EntryPoint("acme", "acme_attention:Backend", GROUP))
    from dataclasses import replace

    monkeypatch.setattr(TorchNativeBackend, "capabilities", replace(TorchNativeBackend.capabilities, dtypes=frozenset()))
    selection = select_for_pool("auto", make([(0, 2)]).pool, torch.float32)
    assert type(selection.backend) is ThirdParty
    assert set(selection.rejected) == {*BUILT_IN}


def test_its_code_is_loaded_only_when_asked_for(install):
    install(*OURS, EntryPoint("broken", "no_such_module_anywhere:B", GROUP))
    assert "broken" in backend_names()
    assert select_for_pool("auto", make([(0, 2)]).pool).backend.name == "torch_native"
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        backend_class("broken")
    assert "broken" not in loadable_classes() and set(BUILT_IN) <= set(loadable_classes())


def test_code_that_can_not_be_imported_is_a_reason_like_any_other(install):
    install(*OURS, EntryPoint("broken", "no_such_module_anywhere:B", GROUP))
    why = "its module cannot be imported: No module named 'no_such_module_anywhere'"
    with pytest.raises(UnsupportedError, match=f"  broken: {why}\n"):
        select_for_pool("broken", make([(0, 2)]).pool)
    with pytest.raises(UnsupportedError, match=f"  broken: {why}\n"):
        select_for_pool("auto", make([(0, 2)]).pool, torch.int8)


def test_a_program_registers_its_own(install):
    install(*OURS, EntryPoint("zeta", "zeta:B", GROUP))
    register_backend("acme", ThirdParty)
    assert backend_class("acme") is ThirdParty
    assert third_party_names() == ["acme", "zeta"] and backend_names()[-3:] == ["acme", "zeta", "reference"]
    assert default_order("cpu", None, third_party_names()).extend[-3:] == ("acme", "zeta", "reference")
    selection = select_for_pool("acme", make([(0, 2)]).pool)
    assert type(selection.backend) is ThirdParty and "zeta" in selection.rejected
    assert select_for_pool("auto", make([(0, 2)]).pool).rejected["acme"].startswith("ranked after torch_native")


def test_a_class_that_is_registered_again_replaces_the_one_before(install):
    install(*OURS)
    register_backend("acme", ThirdParty)
    again = type("ThirdParty", (ReferenceBackend,), {"name": "acme"})
    register_backend("acme", again)
    assert backend_class("acme") is again and third_party_names() == ["acme"]


@pytest.mark.parametrize("name", ["torch_native", "zeta"])
def test_a_name_that_somebody_has_can_not_be_registered(install, name):
    install(*OURS, EntryPoint("zeta", "zeta:B", GROUP))
    with pytest.raises(ValueError, match=rf"there is an attention backend '{name}': .*:.*; choose another name"):
        register_backend(name, type("Mine", (ReferenceBackend,), {"name": name}))
    assert third_party_names() == ["zeta"]


@pytest.mark.parametrize("name", ["", "auto", "acme,fa3", " acme"])
def test_a_name_that_means_something_else_can_not_be_registered(install, name):
    install(*OURS)
    with pytest.raises(ValueError, match=f"an attention backend cannot be called '{name}'"):
        register_backend(name, type("Mine", (ReferenceBackend,), {"name": name}))


def test_what_is_no_backend_can_not_be_registered(install):
    install(*OURS)
    half = type("Half", (AttentionBackend,), {"name": "half", "plan": lambda self, batch, pool: None})
    with pytest.raises(TypeError, match=r"Half cannot be registered as 'half'; it lacks forward_decode, .*write_kv, capabilities"):
        register_backend("half", half)
    for wrong in (dict, ThirdParty(), None):
        with pytest.raises(TypeError, match="cannot be registered as 'acme'; allowed is a class derived from AttentionBackend"):
            register_backend("acme", wrong)
    with pytest.raises(ValueError, match="ThirdParty cannot be registered as 'other'; its own name, which reports show, is 'acme'"):
        register_backend("other", ThirdParty)
    assert backend_names() == [*BUILT_IN]


@pytest.mark.parametrize("name", ["acme", "torch_native"])
def test_two_packages_with_one_name(install, name):
    install(*OURS, EntryPoint(name, "acme_attention:Backend", GROUP), EntryPoint(name, "other_attention:Backend", GROUP))
    with pytest.raises(UnsupportedError, match=rf"two packages register the attention backend '{name}': .* and .*; uninstall one"):
        backend_names()


def test_the_same_entry_found_twice_is_one(install):
    """An editable install and a checkout on the path list the same entry point."""
    install(*OURS, *OURS)
    assert backend_names() == [*BUILT_IN]


@pytest.mark.parametrize("name", ["auto", "acme,fa3"])
def test_names_that_mean_something_else_are_refused(install, name):
    install(*OURS, EntryPoint(name, "acme_attention:Backend", GROUP))
    with pytest.raises(UnsupportedError, match=f"acme_attention:Backend registers an attention backend as '{name}'; .* are taken"):
        backend_names()


def test_orders_hold_registered_names_only():
    for row in ROWS:
        assert {*row.names, *row.by_name_only} <= set(BUILT_IN) and not set(row.names) & set(row.by_name_only)
        assert len(set(row.names)) == len(row.names) and "reference" not in row.names


@pytest.mark.parametrize(
    ("device", "architecture", "first"),
    [
        ("cuda", 90, "fa3"), ("cuda", 100, "trtllm_mha"), ("cuda", 103, "trtllm_mha"), ("cuda", 120, "flashinfer"),
        ("cuda", 75, "flashinfer"),
        ("cpu", None, "torch_native"), ("cpu-amx", None, "torch_native"), ("hip", None, "triton"), ("mps", None, "torch_native"),
    ],
)  # fmt: skip
def test_the_first_of_each_order(device, architecture, first):
    order = default_order(device, architecture)
    assert order.extend[0] == first and order.extend[-1] == order.decode[-1] == "reference"
    assert order.decode[0] == ("triton" if architecture == 90 else first) and set(order.decode) == set(order.extend)


def test_an_order_is_continued_by_another():
    first = Order(("a", "b"), ("b",), "measured", {"a": "fast"})
    later = Order(("b", "c"), ("a", "c"), "usual", {"a": "slow", "c": "?"})
    joined = first.followed_by(later)
    assert joined == Order(("a", "b", "c"), ("b", "a", "c"), "measured", {"a": "fast", "c": "?"}, "usual")
    assert joined.only({"c", "b"}) == Order(("b", "c"), ("b", "c"), "measured", {"a": "fast", "c": "?"}, "usual")


def test_an_unknown_name_lists_the_known_ones(install):
    install(*OURS, EntryPoint("acme", "acme_attention:Backend", GROUP))
    with pytest.raises(
        ValueError, match=r"unknown attention backend 'fa9'; known are 'auto', 'fa3', .*'acme', 'reference', .*two of them as"
    ):
        backend_class("fa9")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_name_without_a_kernel_call_says_what_to_use(install, name):
    """It is in no order, "auto" does not look at it, and a package may bring it."""
    install(*OURS)
    assert name not in backend_names() and not any(name in (*row.names, *row.by_name_only) for row in ROWS)
    layers = make([(0, 2)]).pool.layers
    with pytest.raises(UnsupportedError, match=f"attention backend '{name}': this project has no kernel call for it yet; use "):
        select(name, Requirements.of(layers, torch.float32, torch.float32, 16, torch.device("cpu")))
    theirs = type("Theirs", (ReferenceBackend,), {"name": name})
    register_backend(name, theirs)
    assert backend_class(name) is theirs and third_party_names() == [name]
