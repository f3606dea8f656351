"""`paged-attn doctor`: optional packages are imported apart, backends compute a tiny problem, and what fails gives its reason."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from paged_attn.backends.attention.capabilities import LATENTS_ONLY, Feature, OneOf
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from paged_attn.backends.selection import packages
from paged_attn.backends.selection.packages import OptionalPackage
from paged_attn.cli import smoke
from paged_attn.cli.commands import doctor
from paged_attn.cli.main import main
from tests.backends.fake_backends import PLAIN, fake

CPU = torch.device("cpu")


def test_a_package_that_can_not_be_imported_is_no_failure_but_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    for name, text in {
        "raises": "raise RuntimeError('built for another torch')",
        "kills": "import os; os.kill(os.getpid(), 11)",
        "fine": "",
    }.items():
        (tmp_path / f"{name}_package.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    fakes = [OptionalPackage(f"{n}_package", (), f"what {n} gives", f"pip install {n}") for n in ("raises", "kills", "fine", "absent")]
    monkeypatch.setattr(packages, "PACKAGES", tuple(fakes))
    monkeypatch.setattr(doctor, "_backends", list)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "warn  raises_package   unknown is installed, but import fails (RuntimeError: built for another torch); pip install raises" in lines
    )
    assert "warn  kills_package    unknown is installed, but import fails (ended by signal 11); pip install kills" in lines
    assert "ok    fine_package     unknown: what fine gives" in lines
    assert "-     absent_package   not installed; what absent gives: pip install absent" in lines


def test_backends_are_listed_with_what_is_in_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    found = {finding.name.strip(): finding for finding in doctor._backends()}
    assert found["torch_native"].works is None and found["torch_native"].detail == "backend, runs on cpu"
    assert "reference" not in found and "fa4" not in found
    assert found["fa3"].works is None and "sgl_kernel 0" in found["fa3"].detail  # `_optional` says what installs it
    assert found["fa3"].detail.startswith("backend, runs on cuda; this machine has cpu")


class Children:
    """In place of processes: what each prints, or what goes wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **results: tuple[str, str | None]) -> None:
        self.results, self.started = results, []
        monkeypatch.setattr(doctor, "_started", self.start)
        monkeypatch.setattr(doctor, "_ended", lambda process, seconds: self.results[process])

    def start(self, *arguments: str) -> str:
        self.started.append(arguments)
        return arguments[-2]


def test_on_a_gpu_each_backend_that_can_run_computes_something(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_attn.report import backend_matrix

    row = backend_matrix.attention_row("x", PLAIN)
    heres = {
        "fa3": "yes: cuda",
        "triton": "yes: cuda",
        "flex": "no: needs torch 99",
        "torch_native": "yes: cpu, cuda",
        "flashinfer": "yes: cuda",
    }
    rows = [row | {"Backend": name, "Here": here} for name, here in heres.items()]
    monkeypatch.setattr(backend_matrix, "attention_rows", lambda: rows)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    children = Children(
        monkeypatch, fa3=("compiling\n1e-03 2e-02\n", None), triton=("0.5 0.02", None), torch_native=("nan 0.02", None),
        flashinfer=("", "RuntimeError: no nvcc"),
    )  # fmt: skip
    found = {finding.name.strip(): finding for finding in doctor._backends()}
    assert children.started == [("-m", "paged_attn.cli.smoke", name, "cuda") for name in ("fa3", "triton", "torch_native", "flashinfer")]
    assert found["fa3"].works is True and "differs from the reference by 1.0e-03 (allowed 2e-02), in " in found["fa3"].detail
    assert found["triton"].works is False and not found["triton"].failed and found["triton"].line().startswith("warn ")
    assert found["torch_native"].failed and found["torch_native"].line().startswith("FAIL ")
    assert found["flashinfer"].detail == "backend, fails on this GPU: RuntimeError: no nvcc" and not found["flashinfer"].failed
    assert found["flex"].works is None and found["flex"].detail == "backend, needs torch 99"


def test_a_child_that_hangs_is_ended() -> None:
    process, began = doctor._started("-c", "import time; print('x', flush=True); time.sleep(120)"), time.perf_counter()
    assert doctor._ended(process, 0.5) == ("", "it did not end within 0.5 s")
    assert process.poll() is not None and time.perf_counter() - began < 60
    assert doctor._ended(doctor._started("-c", "print(3)"), 60) == ("3\n", None)
    assert doctor._ended(doctor._started("-c", "raise SystemExit(4)"), 60) == ("", "status 4")


# The tiny problem.


@pytest.mark.parametrize("backend", [TorchNativeBackend(), ReferenceBackend()])
def test_right_backends_differ_little(backend) -> None:
    error, allowed = smoke.smoke_error(backend, CPU)
    assert error <= 1e-5 < allowed == 1e-4


def test_a_backend_for_latents_alone_computes_latents() -> None:
    from dataclasses import replace

    class ForLatents(TorchNativeBackend):
        capabilities = replace(TorchNativeBackend.capabilities, head_dims=LATENTS_ONLY, latent_dims=(OneOf({512}), OneOf({64})))

    assert smoke.smoke_error(ForLatents(), CPU)[0] <= 1e-5


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_a_wrong_result_in_either_phase_is_seen(phase: str) -> None:
    class Wrong(TorchNativeBackend):
        pass

    def spoilt(self, plan, call):
        getattr(TorchNativeBackend, f"forward_{phase}")(self, plan, call)
        call.output[-1, -1, -1] += 0.1

    setattr(Wrong, f"forward_{phase}", spoilt)
    assert smoke.smoke_error(Wrong(), CPU)[0] == pytest.approx(0.1, rel=1e-2)


def test_a_row_that_is_never_written_is_seen() -> None:
    class Silent(TorchNativeBackend):
        def forward_decode(self, plan, call):
            pass

    error, allowed = smoke.smoke_error(Silent(), CPU)
    assert not error <= allowed


def test_keys_that_are_not_stored_are_seen() -> None:
    class Forgetful(TorchNativeBackend):
        def write_kv(self, plan, call):
            pass

    error, allowed = smoke.smoke_error(Forgetful(), CPU)
    assert error > 100 * allowed


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({}, (64, torch.float32, 16)),
        ({"page_sizes": OneOf({64})}, (64, torch.float32, 64)),
        ({"page_sizes": OneOf({256}), "head_dims": OneOf({128})}, (128, torch.float32, 256)),
        ({"phases": frozenset({"decode"})}, (64, torch.float32, 16)),
        ({"head_dims": LATENTS_ONLY, "latent_dims": (OneOf({512}), OneOf({64})), "page_sizes": OneOf({128})}, (576, torch.float32, 128)),
        ({"page_sizes": OneOf({7})}, None),
    ],
)
def test_the_problem_is_one_that_the_backend_takes(capabilities, expected) -> None:
    from dataclasses import replace

    chosen = smoke.smoke_problem(replace(PLAIN, devices=frozenset({"cpu"}), features=frozenset(Feature), **capabilities), CPU)
    assert chosen == expected if chosen is None else (chosen[0].qk_head_dim, *chosen[1:]) == expected


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_requests_share_no_page(phase: str, page_size: int) -> None:
    batch = smoke._batch(phase, page_size)
    used = [page for row, n in zip(batch.page_table.tolist(), batch.seq_lens_host, strict=True) for page in row[: -(-n // page_size)]]
    assert len(set(used)) == len(used) and 0 not in used


def test_no_problem_that_fits_is_said() -> None:
    from dataclasses import replace

    with pytest.raises(ValueError, match="none of the usual dtypes, page sizes and head dims fits"):
        smoke.smoke_error(fake("odd", replace(PLAIN, devices=frozenset({"cpu"}), page_sizes=OneOf({7})))(), CPU)


def test_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "paged_attn.cli.smoke", "torch_native", "cpu"], capture_output=True, text=True, check=True
    )
    error, allowed = map(float, done.stdout.split())
    assert error <= 1e-5 < allowed
