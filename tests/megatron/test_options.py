"""What the user chose: arguments before the environment, the environment before defaults, nonsense never silently."""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from robust_dcp.installation import PATCHES
from robust_dcp.megatron.options import (
    OPTIONS,
    MegatronOptions,
    add_arguments,
    choose_planner,
    current_options,
    default_planner,
    options_from_environment,
)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for option in OPTIONS:
        monkeypatch.delenv(option.variable, raising=False)
    planner = default_planner()
    yield
    choose_planner(planner)


def _megatron_has_parsed(monkeypatch: pytest.MonkeyPatch, **arguments: object) -> None:
    global_vars = types.ModuleType("megatron.training.global_vars")
    global_vars.get_args = lambda: argparse.Namespace(**arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", global_vars)


def test_every_option_has_a_variable() -> None:
    environment = {
        "ROBUST_DCP": "1",
        "ROBUST_DCP_WRITER_THREADS": "4",
        "ROBUST_DCP_EXCHANGE_TIMEOUT_SECONDS": "2.5",
        "ROBUST_DCP_TRUSTED": "1",
        "ROBUST_DCP_SAVE_FAILURE": "warn",
        "ROBUST_DCP_PROVE": "1",
        "ROBUST_DCP_PARITY_NODES": "8",
    }
    assert {option.variable for option in OPTIONS} == set(environment)
    assert options_from_environment(environment) == MegatronOptions("robust_dcp", 4, 2.5, True, "warn", True, 8)
    assert options_from_environment(dict.fromkeys(environment, "")) == MegatronOptions(), "empty is not set"


def test_arguments_are_stronger_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBUST_DCP", "1")
    monkeypatch.setenv("ROBUST_DCP_WRITER_THREADS", "8")
    monkeypatch.setenv("ROBUST_DCP_SAVE_FAILURE", "warn")
    _megatron_has_parsed(monkeypatch, ckpt_planner="default", ckpt_writer_threads=2, ckpt_save_failure=None)
    options = current_options()
    assert (options.planner, options.writer_threads, options.save_failure) == ("default", 2, "warn")


def test_install_s_choice_holds_where_nothing_else_says(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_planner("robust_dcp")
    assert current_options().planner == "robust_dcp"
    with monkeypatch.context() as arguments:
        _megatron_has_parsed(arguments, ckpt_planner="nvidia")  # a planner of Megatron's own
        assert current_options().planner == "default"
    monkeypatch.setenv("ROBUST_DCP", "0")
    _megatron_has_parsed(monkeypatch, ckpt_planner="robust_dcp")
    assert current_options().planner == "default"


def _table_of_patches() -> str:
    """Each module and its attributes, in the order of the table; optional ones in parentheses."""
    rows: dict[str, dict[str, None]] = {}
    for patch in PATCHES:
        rows.setdefault(patch.module, {})[f"(`{patch.name}`)" if patch.optional else f"`{patch.name}`"] = None
    return "".join(f"| `{module}` | {', '.join(names)} |\n" for module, names in rows.items())


def test_the_document_lists_every_option_and_all_that_is_replaced() -> None:
    page = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    assert f"in parentheses: optional |\n| --- | --- |\n{_table_of_patches()}\n" in page, _table_of_patches()
    section = page.partition("\n## Options\n")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| `--ckpt-")]
    assert len(rows) == len(OPTIONS)
    for option, row in zip(OPTIONS, rows, strict=True):
        expected = (option.argument, option.variable, *option.choices)
        assert all(f"`{word}`" in row for word in expected), row


def test_arguments_are_accepted_once_and_their_defaults_leave_megatron_to_itself() -> None:
    assert current_options() == MegatronOptions("default", None, 300.0, False, "raise", False, None)
    parser = add_arguments(add_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    assert {option.field: getattr(parser.parse_args([]), option.dest) for option in OPTIONS} == vars(MegatronOptions())
    words = ("robust_dcp", "4", "60", "1", "warn", "1", "8")
    command_line = [word for option, value in zip(OPTIONS, words, strict=True) for word in (option.argument, value)]
    assert list(vars(parser.parse_args(command_line)).values()) == ["robust_dcp", 4, 60.0, True, "warn", True, 8]
    assert parser.parse_args(["--ckpt-prove-resume"]).ckpt_prove_resume, "of a switch the word alone is enough"
    assert all(option.variable in parser.format_help().replace("\n", " ") for option in OPTIONS)


@pytest.mark.parametrize(
    "command_line",
    ["--ckpt-planner other", "--ckpt-writer-threads 0", "--ckpt-trusted 2", "--ckpt-exchange-timeout-seconds never"],
)
def test_a_wrong_value_ends_the_run_at_its_start(command_line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(command_line.split())
    assert command_line.split()[0] in capsys.readouterr().err
