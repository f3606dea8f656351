"""Selection of two backends by name, and of batch-invariant ones."""

import pytest
import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.backends.attention.capabilities import Feature, OneOf
from paged_attn.backends.attention.hybrid import HybridBackend
from tests.backends.fake_backends import PLAIN, Machine, machine

__all__ = ["machine"]  # a fixture

# Deterministic.


def test_deterministic_takes_what_is_batch_invariant_and_makes_it_so(machine: Machine):
    machine.put("flashinfer", features=PLAIN.features | {Feature.DETERMINISTIC})
    assert not machine.take().backend.deterministic
    selection = machine.take(deterministic=True)
    assert selection.backend.name == "flashinfer" and selection.backend.deterministic
    assert selection.rejected["fa3"] == selection.rejected["triton"] == "no batch-invariant results"


def test_deterministic_refusal_names_those_that_can(machine: Machine):
    machine.put("triton", features=PLAIN.features | {Feature.DETERMINISTIC})
    with pytest.raises(UnsupportedError) as error:
        machine.take("fa3", deterministic=True)
    text = str(error.value)
    assert "backend='fa3' and deterministic=True:\n  fa3: no batch-invariant results\n" in text
    assert "What fits, with batch-invariant results: triton. Try" in text
    with pytest.raises(UnsupportedError, match="Batch-invariant are triton, which do not fit otherwise"):
        machine.take("fa3", deterministic=True, dtype=torch.int8)


def test_two_backends_are_not_batch_invariant(machine: Machine):
    able = PLAIN.features | {Feature.DETERMINISTIC}
    machine.device("cuda", 100)
    machine.put("trtllm_mha", phases=frozenset({"decode"}), features=able)
    machine.put("flashinfer", features=able)
    assert machine.take().backend.name == "flashinfer,trtllm_mha"
    assert machine.take(deterministic=True).backend.name == "flashinfer"
    with pytest.raises(UnsupportedError, match="  flashinfer,trtllm_mha: two backends are not batch-invariant"):
        machine.take("flashinfer,trtllm_mha", deterministic=True)


# Two names.


@pytest.mark.parametrize("name", ["fa3,flashinfer", " fa3 , flashinfer "])
def test_two_names_are_prefill_and_decode(machine: Machine, name):
    selection = machine.take(name)
    assert isinstance(selection.backend, HybridBackend)
    assert (selection.backend.prefill.name, selection.backend.decode.name) == ("fa3", "flashinfer")
    assert selection.backend.name == "fa3,flashinfer" and selection.reason == "asked for by name"
    assert not {"fa3", "flashinfer"} & set(selection.rejected)


@pytest.mark.parametrize("name", ["fa3,fa3", "fa3,", ",fa3", "fa3,flashinfer,triton", "auto,fa3", "fa3,auto", ","])
def test_other_forms_are_refused(machine: Machine, name):
    with pytest.raises(ValueError, match=r"allowed are 'auto', one name, or two different names as 'fa3,flashinfer': prefill, decode"):
        machine.take(name)


def test_each_of_two_is_asked_about_its_phase_only(machine: Machine):
    machine.put("trtllm_mha", phases=frozenset({"decode"}))
    machine.put("fa3", phases=frozenset({"extend"}))
    assert machine.take("fa3,trtllm_mha").backend.name == "fa3,trtllm_mha"
    with pytest.raises(UnsupportedError) as error:
        machine.take("trtllm_mha,fa3")
    assert "\n  trtllm_mha (prefill): serves decode, not extend\n  fa3 (decode): serves extend, not decode\n" in str(error.value)


def test_errors_name_the_one_of_two_that_can_not(machine: Machine):
    machine.put("flashinfer", head_dims=OneOf({64}))
    with pytest.raises(UnsupportedError) as error:
        machine.take("fa3,flashinfer")
    assert "backend='fa3,flashinfer':\n  flashinfer (decode): head dim 128 is not in 64\n" in str(error.value)
    with pytest.raises(UnsupportedError, match=r"  flashinfer \(prefill\): head dim 128 is not in 64"):
        machine.take("flashinfer,fa3")
