"""What ``doctor`` says of packages that are missing or too old, and of switches that lead nowhere."""

from __future__ import annotations

from importlib import metadata

import pytest

from robust_dcp.cli.doctoring.environment import environment_findings
from robust_dcp.cli.doctoring.finding import Finding

VERSION = metadata.version


def finding(name: str) -> Finding:
    (found,) = [each for each in environment_findings() if each.name == name]
    return found


def install(monkeypatch: pytest.MonkeyPatch, name: str, version: str | None) -> None:
    """What pip says of one package."""

    def look_up(asked: str) -> str:
        if asked != name:
            return VERSION(asked)
        if version is None:
            raise metadata.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(metadata, "version", look_up)


@pytest.mark.parametrize(
    ("name", "what_to_do"), [("msgspec", "which brings it along"), ("torch", "install PyTorch 2.7 or newer")]
)
def test_a_package_that_is_not_there_is_a_problem(name: str, what_to_do: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, name, None)
    found = finding(name)
    assert (found.state, found.found) == ("problem", "is not installed") and what_to_do in found.advice


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.6.1+cu124", "problem"), ("1.13", "problem"), ("2.7.0", "ok"), ("2.15.0a0+git1", "ok"), ("3.0", "ok")],
)
def test_a_torch_that_is_too_old_is_a_problem(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "torch", version)
    assert finding("torch").state == state


def test_loads_that_run_any_code_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBUST_DCP_TRUSTED", "1")
    assert finding("ROBUST_DCP_TRUSTED").state == "warning"
    monkeypatch.setenv("ROBUST_DCP_TRUSTED", "0")
    assert "ROBUST_DCP_TRUSTED" not in {each.name for each in environment_findings()}


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_switch_needs_an_entry_point_and_a_source_tree_has_none(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = metadata.EntryPoint("robust_dcp", "robust_dcp_autoload:activate", "torch.backends")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry] if is_installed else [])
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setenv("ROBUST_DCP", "1")
    found = finding("taken over")
    assert found.state == ("ok" if is_installed else "problem")
    assert ("entry point of group torch.backends is missing" in found.found) is not is_installed
