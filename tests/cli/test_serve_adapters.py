"""Flags of `serve` for adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged_attn.cli.main import build_parser
from paged_attn.cli.serve_options import server_settings


def test_names_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    args = parser.parse_args(["serve", "--model", "x", "--lora", "a=/a", "--lora", "b=c=d", "--lora-folder", str(tmp_path)])
    assert args.lora == [("a", "/a"), ("b", "c=d")] and server_settings(args, "x").lora_folder == str(tmp_path)
    assert server_settings(parser.parse_args(["serve", "--model", "x"]), "x").lora_folder is None
    with pytest.raises(SystemExit):
        parser.parse_args(["serve", "--model", "x", "--lora", "folder"])
    assert "'folder' is not a NAME=FOLDER" in capsys.readouterr().err
