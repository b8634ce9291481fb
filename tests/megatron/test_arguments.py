"""The arguments in a parser such as Megatron's: all there, strict, and not twice."""

from __future__ import annotations

import argparse

import pytest

from robust_dcp.megatron.hooks.arguments import add_arguments
from robust_dcp.megatron.hooks.options import OPTIONS, MegatronOptions


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(option.variable, raising=False)


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(allow_abbrev=False)


def test_all_arguments_are_accepted() -> None:
    command_line = (
        "--ckpt-planner robust_dcp --ckpt-writer-threads 4 --ckpt-writer-buffer-bytes 1048576 "
        "--ckpt-layout safetensors --ckpt-exchange-timeout-seconds 60 --ckpt-on-structure-change quiet "
        "--ckpt-save-failure warn "
        "--ckpt-on-unloadable-object error --ckpt-trusted 1"
    )
    args = add_arguments(_parser()).parse_args(command_line.split())
    assert vars(args) == {
        "ckpt_planner": "robust_dcp",
        "ckpt_writer_threads": 4,
        "ckpt_writer_buffer_bytes": 1048576,
        "ckpt_layout": "safetensors",
        "ckpt_exchange_timeout_seconds": 60.0,
        "ckpt_on_structure_change": "quiet",
        "ckpt_save_failure": "warn",
        "ckpt_on_unloadable_object": "error",
        "ckpt_trusted": True,
    }


def test_without_arguments_all_is_megatron_s_own() -> None:
    args = add_arguments(_parser()).parse_args([])
    defaults = MegatronOptions()
    assert {option.field: getattr(args, option.dest) for option in OPTIONS} == vars(defaults)


def test_the_table_of_arguments_shows_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBUST_DCP", "1")
    monkeypatch.setenv("ROBUST_DCP_WRITER_THREADS", "3")
    parser = add_arguments(_parser())
    assert vars(parser.parse_args([]))["ckpt_planner"] == "robust_dcp"
    assert vars(parser.parse_args([]))["ckpt_writer_threads"] == 3
    assert vars(parser.parse_args(["--ckpt-planner", "default"]))["ckpt_planner"] == "default"


@pytest.mark.parametrize(
    "command_line",
    ["--ckpt-planner other", "--ckpt-writer-threads 0", "--ckpt-layout zip", "--ckpt-exchange-timeout-seconds never"],
)
def test_a_wrong_value_ends_the_run_at_its_start(command_line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        add_arguments(_parser()).parse_args(command_line.split())
    assert command_line.split()[0] in capsys.readouterr().err


def test_an_argument_that_megatron_has_is_used_and_learns_our_choices() -> None:
    parser = _parser()
    parser.add_argument("--ckpt-planner", choices=["default", "nvidia"], default="nvidia")
    add_arguments(parser)
    assert parser.parse_args([]).ckpt_planner == "nvidia"
    assert parser.parse_args(["--ckpt-planner", "robust_dcp"]).ckpt_planner == "robust_dcp"
    assert parser.parse_args([]).ckpt_layout == "torch"


def test_an_argument_that_megatron_has_without_choices_stays_as_it_is() -> None:
    parser = _parser()
    parser.add_argument("--ckpt-writer-threads", type=str, default="auto")
    add_arguments(parser)
    assert parser.parse_args(["--ckpt-writer-threads", "many"]).ckpt_writer_threads == "many"


def test_adding_them_twice_is_adding_them_once() -> None:
    parser = add_arguments(add_arguments(_parser()))
    assert parser.format_help().count("\n  --ckpt-planner") == 1


def test_each_help_names_the_variable() -> None:
    text = add_arguments(_parser()).format_help().replace("\n", " ")
    for option in OPTIONS:
        assert option.variable in text
