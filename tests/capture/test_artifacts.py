"""Compiled pieces on disk: what was written comes back, and nothing else does."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paged_attn.capture.compiled_pieces import artifact_key as keys
from paged_attn.capture.compiled_pieces.artifact_key import artifact_key
from paged_attn.capture.compiled_pieces.artifacts import ArtifactCache


class Written:
    """An artifact whose file holds `content`; loaded it returns that."""

    def __init__(self, content: bytes, error: Exception | None = None) -> None:
        self.content, self.error = content, error

    def __call__(self, *args: Any) -> Any:
        return self.content

    def save(self, *, path: str, format: str) -> None:
        assert format == "binary"
        if self.error is not None:
            raise self.error
        Path(path).write_bytes(self.content)


def load(path: Path) -> Callable[..., Any]:
    return Written(path.read_bytes())


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "a" / "pieces", load)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("paged_attn"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def entry(cache: ArtifactCache, key: str) -> Path:
    return cache.folder / f"{key}.piece"


def test_an_entry_comes_back_with_its_guards(cache: ArtifactCache, warnings: Callable[[], list[str]]) -> None:
    assert cache.load("key") is None
    content = bytes(range(256)) * 3
    assert cache.save("key", Written(content), "L['t0'] < 5")
    found = cache.load("key")
    assert found is not None and found.run() == content and found.guards == "L['t0'] < 5"
    assert cache.load("other") is None
    assert [path.name for path in cache.folder.iterdir()] == ["key.piece"], "nothing half-written stays"
    assert cache.folder.stat().st_mode & 0o77 == 0, "what is unpickled belongs to the user alone"
    assert warnings() == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[:-1], "checksum"),
        (lambda content: content[:-1] + b"!", "checksum"),
        (lambda content: content.replace(b"t0", b"t1"), "checksum"),
        (lambda content: content.replace(b'"key": "key"', b'"key": "yek"'), "another piece, yek"),
        (lambda content: b"", "does not begin"),
        (lambda content: b"[]\n", "does not begin"),
        (lambda content: b"\x80\x00" + content, "does not begin"),
        (lambda content: b"{}\n" + content, "does not begin"),
    ],
)
def test_a_damaged_or_foreign_entry_is_not_used(
    cache: ArtifactCache, warnings: Callable[[], list[str]], damage: Callable[[bytes], bytes], words: str
) -> None:
    cache.save("key", Written(b"content"), "L['t0'] < 5")
    path = entry(cache, "key")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.load("key") is None
    assert len(warnings()) == 1 and words in warnings()[0] and "compiled again" in warnings()[0] and str(path) in warnings()[0]
    assert cache.save("key", Written(b"new"), "")
    found = cache.load("key")
    assert found is not None and found.run() == b"new"


@pytest.mark.parametrize(
    "error", [AssertionError("torch_key"), RuntimeError("header"), EOFError(), OSError("disk"), FileNotFoundError("so")]
)
def test_what_torch_can_not_load_is_not_used(tmp_path: Path, warnings: Callable[[], list[str]], error: Exception) -> None:
    def refusing(path: Path) -> Callable[..., Any]:
        raise error

    cache = ArtifactCache(tmp_path, refusing)
    cache.save("key", Written(b"content"), "")
    assert cache.load("key") is None
    assert type(error).__name__ in warnings()[0]


def test_torchs_own_loader_refuses_what_it_did_not_write(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    cache = ArtifactCache(tmp_path)
    for content in (b"", b"content", b"\x00" * 100):
        cache.save("key", Written(content), "")
        assert cache.load("key") is None
    assert len(warnings()) == 3


def test_what_can_not_be_saved_is_no_error(cache: ArtifactCache, tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    assert not cache.save("key", Written(b"", RuntimeError("not serialisable")), "")
    assert warnings() == [] and cache.load("key") is None and list(cache.folder.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert not ArtifactCache(tmp_path / "file" / "pieces", load).save("key", Written(b"content"), "")
    assert "PAGED_ATTN_CACHE" in warnings()[0] and "none" in warnings()[0]


def test_who_reads_while_others_write_finds_one_whole_entry(cache: ArtifactCache, warnings: Callable[[], list[str]]) -> None:
    contents = [bytes([number]) * 100_000 for number in range(3)]
    cache.save("key", Written(contents[0]), "")
    writers = [threading.Thread(target=lambda c=c: [cache.save("key", Written(c), "") for _ in range(30)]) for c in contents]  # type: ignore[misc]
    for writer in writers:
        writer.start()
    found = []
    while any(writer.is_alive() for writer in writers):
        found.append(cache.load("key"))
    assert found and all(each is not None and each.run() in contents for each in found) and warnings() == []


def test_the_variable_names_the_folder_or_switches_it_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folders = {}
    for value in (None, "", "1", "ON", "~/mine", "./off", str(tmp_path / "x")):
        monkeypatch.delenv("PAGED_ATTN_CACHE", raising=False)
        if value is not None:
            monkeypatch.setenv("PAGED_ATTN_CACHE", value)
        cache = ArtifactCache.of_user()
        assert cache is not None
        folders[value] = cache.folder
    home = tmp_path / "home"
    assert folders[None] == folders[""] == folders["1"] == folders["ON"] == home / ".cache" / "paged_attn" / "pieces"
    assert folders["./off"] == Path("off") / "pieces"
    assert folders["~/mine"] == home / "mine" / "pieces" and folders[str(tmp_path / "x")] == tmp_path / "x" / "pieces"
    for value in ("none", "None", "off", "Off", "0", "no", "false"):
        monkeypatch.setenv("PAGED_ATTN_CACHE", value)
        assert ArtifactCache.of_user() is None


def test_the_key_depends_on_whatever_decides_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    before = artifact_key("a")
    assert before == artifact_key("a") != artifact_key("b")
    with config.patch(max_autotune=not config.max_autotune):
        assert artifact_key("a") != before
    with torch.autocast("cpu", torch.bfloat16):
        assert artifact_key("a") != before
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if precision != "high" else "highest")
        assert artifact_key("a") != before
    finally:
        torch.set_float32_matmul_precision(precision)
    for part in ("source_digest", "_versions"):
        with monkeypatch.context() as patched:
            patched.setattr(keys, part, lambda *_: "something else")
            assert artifact_key("a") != before
    monkeypatch.setattr(keys, "_devices", lambda: ["something else"])
    assert artifact_key("a") != before


def test_passes_of_the_user_have_no_key() -> None:
    from torch._inductor import config

    with config.patch(post_grad_custom_post_pass=lambda graph: None):
        assert artifact_key("a") is None
    assert artifact_key("a") is not None


def test_the_key_is_the_same_in_another_process(tmp_path: Path) -> None:
    import subprocess
    import sys

    imports = "from paged_attn.capture.compiled_pieces.artifact_key import artifact_key; import torch"
    code = f"{imports}; torch.set_num_threads(1); print(artifact_key('a'))"
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        ours = artifact_key("a")
    finally:
        torch.set_num_threads(threads)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == ours


def in_the_way(path: Path, kind: str) -> None:
    """Something else where an entry was."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize(("kind", "words"), [("pipe", "is not a file, but a pipe"), ("folder", "but a folder"), ("device", "OSError")])
def test_what_is_no_file_is_not_waited_for(cache: ArtifactCache, warnings: Callable[[], list[str]], kind: str, words: str) -> None:
    """On a thread that is left behind if it hangs."""
    cache.save("key", Written(b"content"), "")
    in_the_way(entry(cache, "key"), kind)
    found: list[object] = ["it hangs"]
    reader = threading.Thread(target=lambda: found.__setitem__(0, cache.load("key")), daemon=True)
    reader.start()
    reader.join(20)
    assert found == [None] and words in warnings()[0] and "compiled again" in warnings()[0]


def test_code_that_others_may_have_written_is_not_run(cache: ArtifactCache, warnings: Callable[[], list[str]]) -> None:
    cache.save("key", Written(b"content"), "")
    assert entry(cache, "key").stat().st_mode & 0o77 == 0
    entry(cache, "key").chmod(0o666)
    assert cache.load("key") is None and "may have been written by others (mode 666); remove it" in warnings()[0]


@pytest.mark.parametrize("which", ["pieces", "."])
def test_a_folder_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]], which: str
) -> None:
    monkeypatch.setenv("PAGED_ATTN_CACHE", str(tmp_path / "x"))
    place = tmp_path / "x" / which
    (tmp_path / "x" / "pieces").mkdir(parents=True)
    place.chmod(0o777)
    assert ArtifactCache.of_user() is None
    assert f"others can write to {place} (mode 777); run `chmod go-w {place}`" in warnings()[0] and "PAGED_ATTN_CACHE" in warnings()[0]
    place.chmod(0o700)
    assert ArtifactCache.of_user() is not None
