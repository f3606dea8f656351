"""Selection: "auto" and a name go one way; reasons are given for what was not taken, and for failing."""

import dataclasses
import logging

import pytest
import torch

import paged_attn
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.capabilities import OneOf, Span
from paged_attn.backends.attention.hybrid import HybridBackend
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from paged_attn.backends.needs import Requirement
from paged_attn.backends.selection import requirements as wanted_module
from paged_attn.backends.selection.registry import BUILT_IN
from paged_attn.backends.selection.requirements import Requirements, reasons_against
from paged_attn.backends.selection.select import select, select_for_pool
from tests.backends.fake_backends import SPEC, Machine, machine

__all__ = ["machine"]  # a fixture

LAYERS = [
    AttentionSpec(4, 2, 8, 8, 0.5, kv_layer=0, module="layers.0"),
    AttentionSpec(4, 2, 8, 8, 0.5, kv_layer=1, softcap=30.0, module="layers.1"),
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_measurements(monkeypatch):
    monkeypatch.setenv("PAGED_ATTN_TUNED", "none")


def choose(name: str, layers=LAYERS, dtype=torch.float32, kv_dtype=torch.float32, page_size=16, device=CPU, **settings):
    return select(name, Requirements.of(layers, dtype, kv_dtype, page_size, device, **settings))


def limit(monkeypatch, backend, **capabilities):
    monkeypatch.setattr(backend, "capabilities", dataclasses.replace(backend.capabilities, **capabilities))


# On this machine, with the real backends.


def test_auto_takes_the_first_that_fits():
    selection = choose("auto")
    assert type(selection.backend) is TorchNativeBackend
    assert selection.reason == "first that fits every layer in the order for a CPU"
    assert selection.rejected["reference"] == "ranked after torch_native"
    assert set(selection.rejected) == {*BUILT_IN} - {"torch_native"}


@pytest.mark.parametrize("cls", [TorchNativeBackend, ReferenceBackend])
def test_a_name_takes_that_one(cls):
    selection = choose(cls.name)
    assert type(selection.backend) is cls
    assert selection.reason == "asked for by name"
    assert set(selection.rejected.values()) == {"asked for another by name"} and cls.name not in selection.rejected


def test_the_reasons_are_unmets_own(monkeypatch):
    calls = []

    def counted(capabilities, problem):
        calls.append(problem)
        return ["made up"]

    monkeypatch.setattr(wanted_module, "unmet", counted)
    with pytest.raises(UnsupportedError, match="torch_native: made up"):
        choose("torch_native")
    assert [p.spec for p in calls[:2]] == LAYERS
    with pytest.raises(UnsupportedError, match=r"torch_native: made up\n(.|\n)*reference: made up"):
        choose("auto")


def test_auto_that_fits_nothing_lists_every_backend():
    with pytest.raises(UnsupportedError) as error:
        choose("auto", kv_dtype=torch.int8)
    text = str(error.value)
    for name in ("torch_native", "reference"):
        assert f"\n  {name}: KV dtype int8 is not among bfloat16, float16, float32, float64\n" in text
    assert all(f"\n  {name}: " in text for name in BUILT_IN)
    assert "Nothing fits in both phases" in text and "`paged-attn backends`" in text


@pytest.mark.parametrize("name", ["fa9", "", "AUTO", "fa9,triton", "triton,fa9"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"unknown attention backend '(fa9|AUTO|)'; known are 'auto', .*'torch_native'.*'reference'"):
        choose(name)


def test_no_problem_no_reason():
    assert reasons_against(TorchNativeBackend.capabilities, []) == []


def test_a_pools_properties_are_used(monkeypatch):
    pool = KVPool(LAYERS, 4, 16, torch.bfloat16)
    limit(monkeypatch, TorchNativeBackend, page_sizes=Span(1, 1), kv_dtypes=frozenset(), dtypes=frozenset())
    of_pool = select_for_pool("auto", pool).rejected["torch_native"]
    assert "page size 16" in of_pool and "KV dtype bfloat16" in of_pool and of_pool.startswith("dtype bfloat16")
    assert select_for_pool("auto", pool, torch.float32).rejected["torch_native"].startswith("dtype float32")
    assert select_for_pool("auto", pool, deterministic=True).backend.deterministic


def test_forward_context_takes_a_name_or_an_object():
    pool = KVPool(LAYERS, 4, 16, torch.float32)
    batch = paged_attn.Batch.build([paged_attn.BatchRequest([1, 2], [1])], 16)
    assert type(paged_attn.forward_context(batch, pool).backend) is TorchNativeBackend
    assert type(paged_attn.forward_context(batch, pool, "reference").backend) is ReferenceBackend
    assert type(paged_attn.forward_context(batch, pool, deterministic=True).backend) is ReferenceBackend
    mine = ReferenceBackend()
    assert paged_attn.forward_context(batch, pool, mine).backend is mine
    with pytest.raises(ValueError, match="unknown attention backend 'x'"):
        paged_attn.forward_context(batch, pool, "x")
    with pytest.raises(ValueError, match="deterministic=True, but the reference backend was made without it"):
        paged_attn.forward_context(batch, pool, mine, deterministic=True)
    made = ReferenceBackend(deterministic=True)
    assert paged_attn.forward_context(batch, pool, made, deterministic=True).backend is made


# On a machine with a GPU and every package, with fake backends.


@pytest.mark.parametrize(
    ("device", "architecture", "taken"),
    [
        ("cuda", 90, "fa3,triton"),
        ("cuda", 100, "trtllm_mha"),
        ("cuda", 103, "trtllm_mha"),
        ("cuda", 80, "flashinfer"),
        ("cuda", 120, "flashinfer"),
    ],
)
def test_the_order_that_sglang_documents(machine: Machine, device, architecture, taken):
    machine.device(device, architecture)
    assert machine.take().backend.name == taken
    machine.lacks("fa3", "trtllm_mha")
    if architecture == 90:  # there our own comes before flashinfer
        assert machine.take().backend.name == "triton" and machine.take().rejected["flashinfer"] == "ranked after triton"
        return
    assert machine.take().backend.name == "flashinfer"
    machine.lacks("flashinfer")
    selection = machine.take()
    assert selection.backend.name == "triton"
    assert selection.rejected["flashinfer"] == "no_flashinfer 2.0 is not installed: pip install flashinfer"
    assert selection.rejected["torch_native"] == "ranked after triton"


@pytest.mark.parametrize("word", ["cpu", "cpu-amx"])
def test_a_cpu_takes_torch_native(machine: Machine, word):
    for name in BUILT_IN:
        machine.put(name, devices=frozenset({"cpu"}))
    machine.device(word)
    assert machine.take().backend.name == "torch_native"


@pytest.mark.parametrize("word", ["hip", "npu", "xpu"])
def test_other_devices_are_refused_with_every_reason(machine: Machine, word):
    machine.device(word)
    with pytest.raises(UnsupportedError, match=f"  fa3: runs on cuda, not on {word}\n"):
        machine.take()


@pytest.mark.parametrize(
    ("capabilities", "asked", "why"),
    [
        ({"page_sizes": OneOf({32, 64})}, {}, "page size 16 is not in 32, 64"),
        ({"dtypes": frozenset({torch.float16})}, {}, "dtype bfloat16 is not among float16"),
        ({"kv_dtypes": frozenset({torch.float16})}, {}, "KV dtype bfloat16 is not among float16"),
        ({"head_dims": OneOf({64, 96})}, {}, "head dim 128 is not in 64, 96"),
        ({"features": frozenset()}, {"spec": dataclasses.replace(SPEC, has_sinks=True)}, "no attention sinks"),
        ({"features": frozenset()}, {"spec": dataclasses.replace(SPEC, softcap=3.0)}, "no softcap"),
        ({"features": frozenset()}, {"spec": dataclasses.replace(SPEC, sliding_window=3)}, "no sliding window"),
        ({"architectures": frozenset({80, 89})}, {}, "needs SM80, SM89, this GPU is SM90"),
    ],
)
def test_auto_and_a_name_meet_the_same_reasons(machine: Machine, capabilities, asked, why):
    """One path: what "auto" says of a backend is what asking for it by name fails with."""
    machine.put("fa3", **capabilities)
    selection = machine.take(**asked)
    assert selection.backend.name == "triton" and selection.rejected["fa3"] == why
    with pytest.raises(UnsupportedError) as error:
        machine.take("fa3", **asked)
    text = str(error.value)
    assert f"with backend='fa3':\n  fa3: {why}\n" in text
    assert "What fits: flashinfer, trtllm_mha, triton" in text and "Try backend='auto'" in text


def test_one_reason_for_several_layers(machine: Machine):
    """Named once: for all layers, or with the first that has it."""
    machine.put("fa3", features=frozenset(), head_dims=OneOf({64}))
    capped = dataclasses.replace(SPEC, softcap=3.0, module="layers.1")
    why = machine.take(spec=(SPEC, capped, capped, SPEC)).rejected["fa3"]
    assert why == "head dim 128 is not in 64; no softcap [layer 1 (layers.1) and 1 more]"
    assert machine.take(spec=(SPEC, dataclasses.replace(capped, module=""))).rejected["fa3"].endswith("no softcap [layer 1]")


def test_on_the_wrong_device_nothing_else_is_said(machine: Machine):
    machine.put("fa3", architectures=frozenset({100}), features=frozenset(), requirements=(Requirement("nothing_here", "1", "pip"),))
    with pytest.raises(UnsupportedError, match="  fa3: needs SM100, this GPU is SM90\n"):
        machine.take("fa3", spec=dataclasses.replace(SPEC, softcap=3.0))


def test_layers_that_no_backend_computes_are_not_asked_about(machine: Machine):
    class Own(AttentionSpec):
        by_backend = False

    machine.put("fa3", head_dims=OneOf({128}))
    assert machine.take(spec=(SPEC, Own(4, 4, 7, 7, 1.0))).backend.name == "fa3,triton"


def test_on_hopper_trtllm_mha_is_taken_by_name_only(machine: Machine):
    machine.put("trtllm_mha", phases=frozenset({"decode"}))
    selection = machine.take()
    assert selection.backend.name == "fa3,triton"
    assert selection.rejected["trtllm_mha"] == "serves decode, not extend"
    machine.put("trtllm_mha")
    assert machine.take().rejected["trtllm_mha"].startswith("by name only: on Hopper its kernel is XQA")
    for name in ("fa3", "flashinfer", "triton", "flash_attn", "torch_varlen", "flex", "torch_native", "reference"):
        machine.lacks(name)
    with pytest.raises(UnsupportedError, match=r"  trtllm_mha: by name only: on Hopper(.|\n)*What fits: trtllm_mha"):
        machine.take()
    assert machine.take("trtllm_mha").backend.name == "trtllm_mha"


def test_a_backend_for_one_phase_that_is_ranked_for_it_is_taken_with_another(machine: Machine):
    machine.device("cuda", 100)
    machine.put("trtllm_mha", phases=frozenset({"decode"}))
    selection = machine.take()
    assert isinstance(selection.backend, HybridBackend) and selection.backend.name == "flashinfer,trtllm_mha"
    assert selection.reason == (
        "flashinfer for prefill and trtllm_mha for decode: the first that fit every layer in the order for Blackwell"
    )
    assert not {"flashinfer", "trtllm_mha"} & set(selection.rejected)
    assert selection.rejected["triton"] == "ranked after flashinfer,trtllm_mha"
    with pytest.raises(UnsupportedError, match="  trtllm_mha: serves decode, not extend\n"):
        machine.take("trtllm_mha")


def test_one_for_prefill_only_is_taken_with_the_next_for_decode(machine: Machine):
    machine.put("fa3", phases=frozenset({"extend"}))
    assert machine.take().backend.name == "fa3,triton"


def test_a_phase_that_none_serves(machine: Machine):
    for name in BUILT_IN:
        machine.put(name, phases=frozenset({"decode"}))
    with pytest.raises(UnsupportedError, match=r"  fa3: serves decode, not extend(.|\n)*  reference: serves decode, not extend"):
        machine.take()


@pytest.mark.parametrize("error", [ImportError("undefined symbol: _ZN3c10"), OSError("libcudart.so.12: cannot open shared object file")])
def test_what_is_installed_but_can_not_be_loaded_is_left_out_with_a_warning(machine: Machine, error, caplog):
    machine.put("fa3", error=error)
    with caplog.at_level(logging.WARNING, logger="paged_attn"):
        selection = machine.take()
    assert selection.backend.name == "triton"
    assert selection.rejected["fa3"] == f"it fits, but cannot be loaded: {error}"
    assert [r.getMessage() for r in caplog.records] == [f"an attention backend is left out: fa3: it fits, but cannot be loaded: {error}"]
    with pytest.raises(UnsupportedError, match=f"  fa3: it fits, but cannot be loaded: {error}"):
        machine.take("fa3")


def test_one_of_two_can_not_be_loaded(machine: Machine):
    machine.device("cuda", 100)
    machine.put("trtllm_mha", phases=frozenset({"decode"}))
    machine.put("flashinfer", error=ImportError("gone"))
    assert machine.take().backend.name == "triton,trtllm_mha"
    with pytest.raises(UnsupportedError, match="  flashinfer: it fits, but cannot be loaded: gone"):
        machine.take("flashinfer,trtllm_mha")


def test_errors_of_another_kind_are_not_swallowed(machine: Machine):
    machine.put("fa3", error=RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        machine.take()


def test_one_log_line_says_chosen_rejected_and_why(machine: Machine, caplog):
    machine.put("fa3", page_sizes=OneOf({64}))
    machine.put("triton", page_sizes=OneOf({64}))
    with caplog.at_level(logging.INFO, logger="paged_attn"):
        selection = machine.take()
    assert [r.getMessage() for r in caplog.records] == [f"attention backend: {selection.describe()}"]
    assert selection.describe() == (
        "flashinfer (first that fits every layer in the order for Hopper); not taken: fa3, triton: page size 16 is not in 64; "
        "trtllm_mha: by name only: on Hopper its kernel is XQA, for decode only, which no measurement of ours has put first; "
        "flash_mla, cutlass_mla, trtllm_mla: runs layers of latents only; "
        "flash_attn, torch_varlen, flex, torch_native, reference: ranked after flashinfer"
    )
