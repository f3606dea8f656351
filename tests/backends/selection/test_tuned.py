"""Measurements of this device as JSON: read, written, left aside with a reason, and the order that they give."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path

import pytest
import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.capabilities import Feature, OneOf, Problem
from paged_attn.backends.attention.hybrid import HybridBackend
from paged_attn.backends.selection import tuned
from paged_attn.backends.selection.tuned import Entry, Kind, current_versions, read_entries, tuned_order, tuned_path, write_entry
from tests.backends.fake_backends import PLAIN, SPEC, Machine, machine

__all__ = ["machine"]

GPU = "Test GPU"
PROBLEM = Problem(SPEC, torch.bfloat16, torch.bfloat16, 16, "cuda", 90)
KIND = Kind(4, 128, 128, "bfloat16", "bfloat16", 16)
DATE = "2026-11-20 12:00 UTC"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "deeper" / "gpu.json"
    monkeypatch.setenv("PAGED_ATTN_TUNED", str(found))
    return found


def entry(prefill: dict, decode: dict, kind: Kind = KIND, **changes) -> Entry:
    """One shape per phase."""
    times = {"extend": {"1x8x8": prefill}, "decode": {"1x8": decode}}
    return dataclasses.replace(Entry(kind, DATE, current_versions(), times), **changes)


def test_kinds_say_what_a_measurement_speaks_for():
    assert Kind.of(PROBLEM) == KIND
    windowed = dataclasses.replace(PROBLEM, spec=dataclasses.replace(SPEC, sliding_window=3, kv_layer=7, module="x"))
    assert Kind.of(windowed) == KIND
    for change in (
        {"dtype": torch.float16}, {"kv_dtype": torch.float16}, {"page_size": 1}, {"extra": frozenset({Feature.DETERMINISTIC})},
        {"spec": dataclasses.replace(SPEC, num_q_heads=8)}, {"spec": dataclasses.replace(SPEC, qk_head_dim=64)},
        {"spec": dataclasses.replace(SPEC, v_head_dim=64)},
    ):  # fmt: skip
        assert Kind.of(dataclasses.replace(PROBLEM, **change)) != KIND, change
    assert str(KIND) == "head dim 128, 4 query heads per KV head, bfloat16, pages of 16"
    other = Kind(1, 192, 128, "float16", "float8_e4m3fn", 1, True)
    assert str(other) == "head dim 192/128, 1 query heads per KV head, float16 with KV in float8_e4m3fn, pages of 1, deterministic"


def test_a_ranking_is_the_geometric_mean_of_what_ran_every_shape():
    times = {"extend": {"a": {"x": 10.0, "y": 20.0, "z": 1.0}, "b": {"x": 90.0, "y": 20.0, "z": "it failed"}}}
    ranking = Entry(KIND, DATE, {}, times).ranking("extend")
    assert list(ranking) == ["y", "x"] and ranking == {"y": 1.0, "x": pytest.approx(1.5)}  # sqrt(400), sqrt(900)
    assert Entry(KIND, DATE, {}, {"extend": {}}).ranking("extend") == {}
    assert Entry(KIND, DATE, {}, {"extend": {"a": {"x": 0.0, "y": 2.0}}}).ranking("extend") == {"y": 1.0}
    assert Entry(KIND, DATE, {}, {"extend": {"a": {"x": 1.0}, "b": {"y": 1.0}}}).ranking("extend") == {}


def test_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("PAGED_ATTN_TUNED", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned_path("NVIDIA H200 (141 GB)") == tmp_path / "paged_attn" / "tuned" / "nvidia-h200-141-gb.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuned_path("CPU x86_64") == tmp_path / "home" / ".cache" / "paged_attn" / "tuned" / "cpu-x86-64.json"
    monkeypatch.setenv("PAGED_ATTN_TUNED", "~/mine.json")
    assert tuned_path("anything") == tmp_path / "home" / "mine.json"
    monkeypatch.setenv("PAGED_ATTN_TUNED", "on")
    assert tuned_path("CPU x86_64") == tmp_path / "home" / ".cache" / "paged_attn" / "tuned" / "cpu-x86-64.json"
    for off in ("none", "NONE", "off", "0", "no", "false"):
        monkeypatch.setenv("PAGED_ATTN_TUNED", off)
        assert tuned_path("anything") is None


def test_what_is_written_is_read(path: Path):
    first = entry({"fa3": 1.0, "triton": "no"}, {"fa3": 2.0}, conditions={"driver": "580"})
    other = entry({"triton": 1.0}, {"triton": 2.0}, dataclasses.replace(KIND, page_size=64))
    write_entry(path, GPU, first)
    write_entry(path, GPU, other)
    assert read_entries(path, GPU) == [first, other]
    newer = dataclasses.replace(first, date="2026-11-21 12:00 UTC")
    write_entry(path, GPU, newer)
    assert read_entries(path, GPU) == [other, newer]
    data = json.loads(path.read_text())
    assert data["device"] == GPU and data["entries"][1]["ranking"] == {"extend": {"fa3": 1.0}, "decode": {"fa3": 1.0}}
    assert data["entries"][1]["conditions"] == {"driver": "580"} and set(data["entries"][1]["versions"]) >= {"torch", "paged_attn"}
    assert list(path.parent.iterdir()) == [path]


def test_a_file_of_another_device_is_not_used_and_is_written_over(path: Path):
    write_entry(path, "Another GPU", entry({"fa3": 1.0}, {"fa3": 1.0}))
    assert read_entries(path, GPU) == [] and tuned_order([PROBLEM], GPU) == (None, "")
    mine = entry({"triton": 1.0}, {"triton": 1.0})
    write_entry(path, GPU, mine)
    assert read_entries(path, GPU) == [mine]


def file_of(entry: object) -> str:
    return json.dumps({"format": 1, "device": GPU, "entries": [entry]})


def file_of_times(**phases: object) -> str:
    return file_of({"kind": dataclasses.asdict(KIND), "date": DATE, "versions": current_versions(), "microseconds": phases})


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"format": 2}', file_of({"kind": {"x": 1}}), file_of_times(extend={}), file_of_times(extend=[], decode={}),
        file_of_times(extend={"1x8": {"triton": None}}, decode={"1x8": {"triton": 1.0}}),
    ],
)  # fmt: skip
def test_a_file_that_can_not_be_read_says_which_and_what_to_do(path: Path, text: str, caplog):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(UnsupportedError, match=rf"{path} cannot be read as measurements .*; delete it, .* or set PAGED_ATTN_TUNED=none"):
        tuned_order([PROBLEM], GPU)
    mine = entry({"triton": 1.0}, {"triton": 1.0})
    write_entry(path, GPU, mine)
    assert read_entries(path, GPU) == [mine] and "overwriting it" in caplog.text


@pytest.mark.parametrize("kind", ["pipe", "link to a device", "deep", "large"])
def test_a_file_that_never_ends_hangs_no_start(path: Path, kind: str):
    """On a thread that is left behind if it hangs."""
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "deep":
        path.write_text("[" * 100_000)
    else:
        with path.open("wb") as file:
            file.truncate(tuned.MOST_BYTES + 1)
    told: list[str] = []

    def read() -> None:
        try:
            read_entries(path, GPU)
        except UnsupportedError as error:
            told.append(str(error))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(20)
    assert told and "delete it" in told[0] and "PAGED_ATTN_TUNED=none" in told[0]


def test_without_a_file_or_layers_nothing_is_said(path: Path, monkeypatch: pytest.MonkeyPatch):
    assert tuned_order([PROBLEM], GPU) == (None, "")
    write_entry(path, GPU, entry({"triton": 1.0}, {"triton": 1.0}))
    assert tuned_order([], GPU) == (None, "")
    assert tuned_order([PROBLEM], GPU)[0] is not None
    monkeypatch.setenv("PAGED_ATTN_TUNED", "none")
    assert tuned_order([PROBLEM], GPU) == (None, "")


def test_another_kind_of_layer_is_left_aside_with_a_reason(path: Path):
    write_entry(path, GPU, entry({"triton": 1.0}, {"triton": 1.0}))
    small = dataclasses.replace(PROBLEM, page_size=1)
    assert tuned_order([PROBLEM, small], GPU) == (
        None, f"{path} has no measurement for head dim 128, 4 query heads per KV head, bfloat16, pages of 1"
    )  # fmt: skip


def test_other_versions_are_left_aside_with_a_reason(path: Path, monkeypatch: pytest.MonkeyPatch):
    now = current_versions()
    write_entry(path, GPU, entry({"triton": 1.0}, {"triton": 1.0}, versions={**now, "torch": "2.0"}))
    assert tuned_order([PROBLEM], GPU) == (
        None, f"{path} was measured with torch 2.0, now {now['torch']}: run `paged-attn tune` again"
    )  # fmt: skip
    write_entry(path, GPU, entry({"triton": 1.0}, {"triton": 1.0}, versions={**now, "flashinfer": "0.0.1"}))
    assert f"flashinfer 0.0.1, now {now.get('flashinfer', '(none)')}" in tuned_order([PROBLEM], GPU)[1]
    write_entry(path, GPU, entry({"triton": 1.0}, {"triton": 1.0}, versions={k: v for k, v in now.items() if k != "torch"}))
    assert f"torch (none), now {now['torch']}" in tuned_order([PROBLEM], GPU)[1]


def test_a_phase_that_none_ran_is_left_aside_with_a_reason(path: Path):
    write_entry(path, GPU, entry({"triton": 1.0}, {"triton": "failed"}))
    assert tuned_order([PROBLEM], GPU) == (None, f"{path} has no backend that ran every shape in both phases")


def order_of(path: Path, *entries: Entry, problems=(PROBLEM,)):
    for each in entries:
        write_entry(path, GPU, each)
    order, why_not = tuned_order(problems, GPU)
    assert order is not None and why_not == ""
    return order


def test_each_phase_has_its_own_order(path: Path):
    order = order_of(path, entry({"fa3": 10.0, "triton": 15.0}, {"fa3": 12.0, "triton": 10.0, "trtllm_mha": 11.0}))
    assert order.extend == ("fa3", "triton") and order.decode == ("triton", "trtllm_mha", "fa3")
    assert order.why == (
        f"the order that `paged-attn tune` measured on {DATE}, {path} (time over the fastest: prefill fa3 1.00, triton 1.50; "
        "decode triton 1.00, trtllm_mha 1.10, fa3 1.20)"
    )
    assert order.notes["fa3"] == "measured 1.00 x the fastest in prefill, 1.20 x the fastest in decode"
    assert order.notes["trtllm_mha"] == "measured 1.10 x the fastest in decode"


def test_one_that_is_nearly_the_fastest_in_both_phases_is_first_in_both(path: Path):
    order = order_of(path, entry({"fa3": 10.0, "triton": 10.25}, {"fa3": 13.0, "triton": 10.0}))
    assert order.extend == ("triton", "fa3") and order.decode == ("triton", "fa3")
    order = order_of(path, entry({"fa3": 10.0, "triton": 10.4}, {"fa3": 13.0, "triton": 10.0}))
    assert order.extend == ("fa3", "triton") and order.decode == ("triton", "fa3")
    order = order_of(path, entry({"a": 10.0, "b": 10.2}, {"a": 10.25, "b": 10.0}))
    assert order.extend == order.decode == ("b", "a")  # both near: the better one over both phases


def test_several_kinds_of_layers_weigh_as_many_as_they_are(path: Path):
    small = dataclasses.replace(PROBLEM, spec=dataclasses.replace(SPEC, qk_head_dim=64, v_head_dim=64))
    large, little = (
        entry({"a": 10.0, "b": 20.0}, {"a": 1.0, "b": 1.0}),
        entry({"a": 80.0, "b": 10.0, "c": 1.0}, {"a": 1.0, "b": 1.0}, Kind.of(small)),
    )
    order = order_of(path, large, little, problems=[PROBLEM, small])
    assert order.extend == ("b", "a") and "prefill b 1.00, a 2.00" in order.why  # (8 / 2) ** (1 / 2); c ran one kind only
    order = order_of(path, large, little, problems=[PROBLEM] * 9 + [small])
    assert order.extend == ("a", "b")


# In the selection.


def test_the_selection_goes_by_it_and_cites_file_date_and_numbers(path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGED_ATTN_TUNED", str(path))
    write_entry(path, GPU, entry({"triton": 10.0, "fa3": 12.0}, {"triton": 10.0, "fa3": 15.0}))
    selection = machine.take()
    assert selection.backend.name == "triton"
    assert selection.reason.startswith(f"first that fits every layer in the order that `paged-attn tune` measured on {DATE}, {path} (")
    assert "prefill triton 1.00, fa3 1.20; decode triton 1.00, fa3 1.50" in selection.reason
    assert selection.rejected["fa3"] == "ranked after triton, measured 1.20 x the fastest in prefill, 1.50 x the fastest in decode"
    assert selection.rejected["flashinfer"] == "ranked after triton"


def test_the_fastest_of_each_phase_are_taken_together(path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGED_ATTN_TUNED", str(path))
    write_entry(path, GPU, entry({"triton": 20.0, "fa3": 10.0}, {"triton": 10.0, "fa3": 15.0}))
    selection = machine.take()
    assert isinstance(selection.backend, HybridBackend) and selection.backend.name == "fa3,triton"
    assert selection.reason.startswith("fa3 for prefill and triton for decode: the first that fit every layer in the order that")


def test_what_was_measured_but_does_not_fit_is_passed_over(path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGED_ATTN_TUNED", str(path))
    write_entry(path, GPU, entry({"triton": 10.0, "gone": 1.0}, {"triton": 10.0, "gone": 1.0}))
    assert machine.take().backend.name == "triton"  # "gone" is not registered any more
    machine.put("triton", features=frozenset())
    selection = machine.take(spec=dataclasses.replace(SPEC, softcap=3.0))
    assert selection.backend.name == "fa3" and selection.rejected["triton"] == "no softcap"
    assert selection.reason == "first that fits every layer in the order for Hopper; nothing that was measured fits"


def test_measurements_that_are_not_used_are_in_the_reason(path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGED_ATTN_TUNED", str(path))
    write_entry(path, GPU, entry({"triton": 10.0}, {"triton": 10.0}))
    assert machine.take().backend.name == "triton"
    selection = machine.take(page_size=64)
    usual = "fa3 for prefill and triton for decode: the first that fit every layer in the order for Hopper"
    assert selection.backend.name == "fa3,triton"
    assert selection.reason.startswith(f"{usual}; {path} has no measurement for head dim 128")
    machine.device("cuda", 90, "Another GPU")
    assert machine.take().reason == usual


def test_batch_invariant_kernels_are_measured_apart(path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGED_ATTN_TUNED", str(path))
    for name in ("fa3", "triton"):
        machine.put(name, features=PLAIN.features | {Feature.DETERMINISTIC})
    write_entry(path, GPU, entry({"triton": 20.0, "fa3": 10.0}, {"triton": 20.0, "fa3": 10.0}))
    assert machine.take().backend.name == "fa3" and machine.take(deterministic=True).backend.name == "triton"
    write_entry(
        path, GPU, entry({"triton": 10.0, "fa3": 30.0}, {"triton": 20.0, "fa3": 10.0}, dataclasses.replace(KIND, deterministic=True))
    )
    selection = machine.take(deterministic=True)
    assert selection.backend.name == "fa3"  # never two of them: decode's order
    assert "measured on" in selection.reason


def test_layers_that_no_backend_computes_need_no_measurement(path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch):
    class Own(AttentionSpec):
        by_backend = False

    monkeypatch.setenv("PAGED_ATTN_TUNED", str(path))
    write_entry(path, GPU, entry({"triton": 10.0}, {"triton": 10.0}))
    assert machine.take(spec=(SPEC, Own(4, 4, 7, 7, 1.0))).backend.name == "triton"


def test_a_name_is_taken_whatever_was_measured(path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGED_ATTN_TUNED", str(path))
    path.parent.mkdir()
    path.write_text("not JSON")
    machine.put("flashinfer", head_dims=OneOf({128}))
    assert machine.take("flashinfer").backend.name == "flashinfer"
    with pytest.raises(UnsupportedError, match="cannot be read"):
        machine.take()


def test_the_packages_that_count_are_the_kernels():
    assert {package.module for package in tuned.PACKAGES if package.is_kernels} == {"triton", "flashinfer", "sgl_kernel", "flash_attn"}
    assert set(current_versions()) >= {"torch", "paged_attn", "triton"} and "numpy" not in current_versions()
