"""Engine settings: ranges, types, unknown names, environment variables."""

import argparse
import dataclasses

import pytest

from paged_attn import EngineConfig
from paged_attn.cli.options import add_engine, engine_config
from paged_attn.engine.config import parse_setting

NAMES = [setting.name for setting in dataclasses.fields(EngineConfig)]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(f"PAGED_ATTN_{name.upper()}", raising=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 0), ("page_size", -4), ("num_pages", 1), ("max_batch_tokens", 0), ("max_requests", 0), ("state_snapshots", -1),
        ("kv_memory_gib", -0.5),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}; allowed are values of at least"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("name", ["inductor", "merge_linears", "gemv", "pdl"])
def test_what_needs_the_graph_is_refused_without_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=True with compile=False: that needs the model's graph"):
        EngineConfig(compile=False, **{name: True})
    EngineConfig(compile=False, **{name: False})
    EngineConfig(compile=True, **{name: True})


def test_not_a_number_is_out_of_range() -> None:
    with pytest.raises(ValueError, match="kv_memory_gib is nan"):
        EngineConfig(kv_memory_gib=float("nan"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", "16"), ("page_size", 16.0), ("page_size", True), ("page_size", None), ("num_pages", False), ("prefix_cache", 1),
        ("prefix_cache", None), ("backend", None), ("backend", 3), ("inductor", "yes"), ("kv_memory_gib", "1"), ("kv_memory_gib", True),
        ("deterministic", 1), ("deterministic", None), ("policy", None),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"^{name} is .*; allowed is"):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["both", "", "FCFS"])
def test_a_word_that_is_no_choice_is_refused_with_the_choices(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = f"policy is '{value}'; allowed are 'fcfs' and 'lpm': who of one namespace and priority"
    with pytest.raises(ValueError, match=message):
        EngineConfig(policy=value)
    monkeypatch.setenv("PAGED_ATTN_POLICY", value)
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_environment()
    assert EngineConfig(policy="lpm").policy == "lpm"


@pytest.mark.parametrize("make", [EngineConfig, EngineConfig.from_environment, EngineConfig().with_])
def test_an_unknown_setting_lists_the_known_ones(make) -> None:
    with pytest.raises(ValueError, match=r"unknown engine setting 'pagesize' \(did you mean page_size\?\); known: page_size,") as raised:
        make(pagesize=16)
    assert all(name in str(raised.value) for name in NAMES)


def test_it_is_frozen_and_with_makes_a_checked_copy() -> None:
    config = EngineConfig(page_size=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 4  # type: ignore[misc]
    changed = config.with_(max_requests=3)
    assert (changed.page_size, changed.max_requests, config.max_requests) == (8, 3, 256)
    with pytest.raises(ValueError, match="max_requests is 0"):
        config.with_(max_requests=0)


def test_variables_are_read_and_given_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "page_size": "8", "num_pages": "none", "state_snapshots": "0", "kv_memory_gib": "0.5", "prefix_cache": "off", "inductor": "1",
        "backend": "torch_native", "deterministic": "on", "policy": "lpm",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"PAGED_ATTN_{name.upper()}", text)
    config = EngineConfig.from_environment(page_size=32)
    assert config == EngineConfig(
        page_size=32,
        kv_memory_gib=0.5,
        state_snapshots=0,
        prefix_cache=False,
        inductor=True,
        backend="torch_native",
        deterministic=True,
        policy="lpm",
    )


@pytest.mark.parametrize(
    ("name", "text"), [("page_size", "many"), ("page_size", "1.5"), ("page_size", "none"), ("prefix_cache", "maybe"), ("inductor", "2")]
)
def test_a_variable_that_does_not_parse_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(f"PAGED_ATTN_{name.upper()}", text)
    with pytest.raises(ValueError, match=rf"the environment variable PAGED_ATTN_{name.upper()}: {name} is '{text}'; allowed is"):
        EngineConfig.from_environment()


def test_a_variable_that_nothing_reads_is_warned_about(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("PAGED_ATTN_PAGE_SISE", "PAGED_ATTN_CACHE", "PAGED_ATTN_PAGE_SIZE", "PAGED_ATTN_EARLY_ROWS"):
        monkeypatch.setenv(name, "1")
    with pytest.warns(DeprecationWarning):
        EngineConfig.from_environment()
    warned = [record.getMessage() for record in caplog.records]
    assert warned == ["nothing reads the environment variable PAGED_ATTN_PAGE_SISE; did you mean PAGED_ATTN_PAGE_SIZE?"]


def test_a_variable_out_of_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTN_PAGE_SIZE", "0")
    with pytest.raises(ValueError, match="the environment variable PAGED_ATTN_PAGE_SIZE: page_size is 0"):
        EngineConfig.from_environment()
    assert EngineConfig.from_environment(page_size=4).page_size == 4, "what is given in its place counts"


def test_parsed_values_have_the_settings_types() -> None:
    assert parse_setting("num_pages", "12") == 12 and parse_setting("num_pages", "None") is None
    assert parse_setting("kv_memory_gib", "2") == 2.0
    assert parse_setting("prefix_cache", "No") is False and parse_setting("prefix_cache", "TRUE") is True
    assert parse_setting("backend", "none") == "none"


def test_every_setting_explains_itself() -> None:
    assert all(len(setting.metadata["help"]) > 10 for setting in dataclasses.fields(EngineConfig))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"early_rows": False}, {"early_logits_gather": False}),
        ({"one_row_linears": True}, {"gemv": True}),
        ({"early_launches": False}, {"pdl": False}),
        ({"graphs": "pieces"}, {"graphs": "piecewise"}),
        ({"rope_and_store": False}, {}),
    ],
)
def test_names_of_the_last_release_work_with_a_warning(old, new):
    (name,) = old
    for make in (EngineConfig, EngineConfig.from_environment, EngineConfig().with_):
        with pytest.warns(DeprecationWarning, match=name):
            assert make(**old) == EngineConfig(**new)


def test_what_is_gone_or_given_twice_is_refused():
    with pytest.raises(ValueError, match="rope_and_store=True: this setting is gone"):
        EngineConfig(rope_and_store=True)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="early_rows is the old name of early_logits_gather, and both"):
        EngineConfig.from_environment(one_row_linears=True, early_rows=True, early_logits_gather=True)


def test_old_variables_and_flags_work(monkeypatch):
    monkeypatch.setenv("PAGED_ATTN_EARLY_ROWS", "off")
    with pytest.warns(DeprecationWarning):
        assert not EngineConfig.from_environment().early_logits_gather
    monkeypatch.delenv("PAGED_ATTN_EARLY_ROWS")
    parser = argparse.ArgumentParser()
    add_engine(parser)
    args = parser.parse_args(["--no-early-rows", "--graphs", "pieces", "--disable-passes", "gemv, merge_linears"])
    with pytest.warns(DeprecationWarning):
        found = engine_config(args)
    assert found == EngineConfig(early_logits_gather=False, graphs="piecewise", disable_passes=("gemv", "merge_linears"))
    assert "--early-rows" not in parser.format_help()


@pytest.mark.parametrize(("cuda", "triton"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("given", [{}, {"compile": False}, {"graphs": "off"}, {"overlap": False, "gemv": True, "max_batch_tokens": 7}])
def test_what_depends_on_the_device_is_decided_once(cuda, triton, given):
    found = EngineConfig(**given).resolved(cuda=cuda, has_triton=triton)
    traced = cuda and given.get("compile", True)
    expected = {
        "max_batch_tokens": 8192 if cuda else 2048, "overlap": cuda, "inductor": traced, "merge_linears": traced,
        "gemv": traced and triton, "pdl": traced and "graphs" not in given, "graphs": "full",
    } | given  # fmt: skip
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.resolved(cuda=not cuda, has_triton=not triton) == found
