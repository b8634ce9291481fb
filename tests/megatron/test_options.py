"""What the user chose: arguments before the environment, the environment before defaults, nonsense never silently."""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.megatron.hooks.options import (
    OPTIONS,
    MegatronOptions,
    choose_planner,
    current_options,
    default_planner,
    options_from_environment,
)
from tests.megatron.patch_table import DOCUMENT


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


def test_defaults_leave_megatron_to_itself() -> None:
    assert current_options() == MegatronOptions("default", None, None, "torch", 300.0, "rebuild", "raise")


def test_every_option_has_a_variable() -> None:
    environment = {
        "ROBUST_DCP": "1",
        "ROBUST_DCP_WRITER_THREADS": "4",
        "ROBUST_DCP_WRITER_BUFFER_BYTES": "1048576",
        "ROBUST_DCP_LAYOUT": "safetensors",
        "ROBUST_DCP_EXCHANGE_TIMEOUT_SECONDS": "2.5",
        "ROBUST_DCP_ON_STRUCTURE_CHANGE": "error",
        "ROBUST_DCP_SAVE_FAILURE": "warn",
        "ROBUST_DCP_ON_UNLOADABLE_OBJECT": "error",
        "ROBUST_DCP_TRUSTED": "1",
    }
    assert {option.variable for option in OPTIONS} == set(environment)
    expected = MegatronOptions("robust_dcp", 4, 1048576, "safetensors", 2.5, "error", "warn", "error", True)
    assert options_from_environment(environment) == expected


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    assert options_from_environment({option.variable: "" for option in OPTIONS}) == MegatronOptions()


@given(threads=st.integers(1, 10**6), seconds=st.floats(1e-3, 1e9))
def test_numbers_come_back_as_they_were_written(threads: int, seconds: float) -> None:
    written = {"ROBUST_DCP_WRITER_THREADS": str(threads), "ROBUST_DCP_EXCHANGE_TIMEOUT_SECONDS": repr(seconds)}
    options = options_from_environment(written)
    assert (options.writer_threads, options.exchange_timeout_seconds) == (threads, seconds)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ROBUST_DCP", "ja"),
        ("ROBUST_DCP_WRITER_THREADS", "0"),
        ("ROBUST_DCP_WRITER_THREADS", "many"),
        ("ROBUST_DCP_WRITER_BUFFER_BYTES", "-1"),
        ("ROBUST_DCP_LAYOUT", "zip"),
        ("ROBUST_DCP_EXCHANGE_TIMEOUT_SECONDS", "inf"),
        ("ROBUST_DCP_ON_STRUCTURE_CHANGE", "ignore"),
        ("ROBUST_DCP_SAVE_FAILURE", "log"),
    ],
)
def test_a_variable_without_meaning_is_named(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{variable}='{value}' in the environment: expected"):
        options_from_environment({variable: value})


def test_arguments_are_stronger_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBUST_DCP", "1")
    monkeypatch.setenv("ROBUST_DCP_WRITER_THREADS", "8")
    _megatron_has_parsed(monkeypatch, ckpt_planner="default", ckpt_writer_threads=2)
    options = current_options()
    assert (options.planner, options.writer_threads) == ("default", 2)


def test_the_environment_counts_for_arguments_that_a_caller_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBUST_DCP", "1")
    monkeypatch.setenv("ROBUST_DCP_LAYOUT", "safetensors")
    _megatron_has_parsed(monkeypatch, ckpt_layout=None, save="/checkpoints")
    options = current_options()
    assert (options.planner, options.layout) == ("robust_dcp", "safetensors")


def test_a_planner_of_megatron_s_own_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_planner("robust_dcp")
    _megatron_has_parsed(monkeypatch, ckpt_planner="nvidia")
    assert current_options().planner == "default"


def test_install_s_choice_holds_where_nothing_else_says(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_planner("robust_dcp")
    assert current_options().planner == "robust_dcp"
    monkeypatch.setenv("ROBUST_DCP", "0")
    assert current_options().planner == "default"


def test_arguments_that_are_not_parsed_yet_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_args() -> None:
        raise AssertionError("args is not initialized.")

    global_vars = types.ModuleType("megatron.training.global_vars")
    global_vars.get_args = get_args  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", global_vars)
    assert current_options() == MegatronOptions()


def test_the_document_lists_every_option() -> None:
    section = DOCUMENT.read_text().partition("\n## Options\n")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| `--ckpt-")]
    assert len(rows) == len(OPTIONS)
    for option, row in zip(OPTIONS, rows, strict=True):
        expected = (option.argument, option.variable, *option.choices)
        assert all(f"`{word}`" in row for word in expected), row
