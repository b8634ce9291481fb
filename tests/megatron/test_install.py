"""``install`` and ``uninstall``: what differs between them, what does not before and after, and when it happens."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from robust_dcp.switch.patching import Patch, Patches
from tests.megatron import patch_table
from tests.megatron.small_megatron import run_python

_MODULES = {
    "first.py": """
def plan(): return "stock"
class Strategy:
    def save(self): return "stock"
    @staticmethod
    def name(): return "stock"
    @classmethod
    def kind(cls): return cls.__name__
class Derived(Strategy):
    pass
""",
    "second.py": "from {package}.first import plan\ndef call(): return plan()\n",
    "third.py": "from {package}.first import plan\n",
    "broken.py": "raise ImportError('of its own')\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a package with the modules above, not imported yet."""
    name = f"patched_{abs(hash(tmp_path)):x}"
    (tmp_path / name).mkdir()
    for file, text in {"__init__.py": "", **_MODULES}.items():
        (tmp_path / name / file).write_text(text.replace("{package}", name))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[module]


def _import(package: str, name: str) -> Any:
    return importlib.import_module(f"{package}.{name}")


def _robust(original: Any) -> Any:
    return lambda *args: f"robust over {original(*args)}"


def _patches(package: str, *targets: str, optional: bool = False) -> Patches:
    """``"second.plan"``: attribute ``plan`` of module ``second``."""
    split = [target.partition(".") for target in targets]
    return Patches(Patch(f"{package}.{module}", name, _robust, optional) for module, _, name in split)


def test_modules_that_are_imported_are_patched_now_and_put_back(package: str) -> None:
    first = _import(package, "first")
    before = {**vars(first), **vars(first.Strategy)}
    patches = _patches(package, "first.plan", "first.Strategy.save", "first.Strategy.name", "first.Strategy.kind")
    patches.apply()
    strategy = first.Strategy()
    found = [first.plan(), strategy.save(), strategy.name(), first.Strategy.name(), strategy.kind()]
    assert found == ["robust over stock"] * 4 + ["robust over Strategy"]
    patches.remove()
    after = {**vars(first), **vars(first.Strategy)}
    assert {name for name in before if before[name] is not after[name]} == set()


def test_modules_that_come_later_are_patched_when_they_come(package: str) -> None:
    patches = _patches(package, "first.plan")
    patches.apply()
    assert f"{package}.first" not in sys.modules
    assert _import(package, "first").plan() == "robust over stock"
    patches.remove()
    assert _import(package, "first").plan() == "stock"


def test_what_is_not_listed_stays(package: str) -> None:
    patches = _patches(package, "first.plan")
    patches.apply()
    first = _import(package, "first")
    assert (first.Strategy().save(), first.Strategy.name()) == ("stock", "stock")
    patches.remove()


def test_a_module_s_loader_and_source_are_as_ever(package: str) -> None:
    unwatched = _import(package, "second")
    patches = _patches(package, "third.plan")
    patches.apply()
    watched = _import(package, "third")
    assert type(watched.__loader__) is type(watched.__spec__.loader) is type(unwatched.__loader__)
    patches.remove()


def test_applying_and_removing_twice_is_doing_it_once(package: str) -> None:
    patches = _patches(package, "first.plan")
    patches.apply()
    first = _import(package, "first")
    patches.apply()
    assert first.plan() == "robust over stock"
    patches.remove()
    patches.remove()
    assert first.plan() == "stock"
    assert not any(type(finder).__module__.startswith("robust_dcp.") for finder in sys.meta_path)


def test_a_replacement_bound_by_name_is_replaced_once_and_put_back_everywhere(package: str) -> None:
    """``second`` is listed as well, ``third`` is not; both import the name from where it is replaced already."""
    patches = _patches(package, "first.plan", "second.plan")
    patches.apply()
    second, third = _import(package, "second"), _import(package, "third")
    assert (second.call(), third.plan()) == ("robust over stock", "robust over stock")
    patches.remove()
    first = _import(package, "first")
    assert first.plan is second.plan is third.plan
    assert first.plan() == "stock"


def test_an_inherited_attribute_is_inherited_again(package: str) -> None:
    patches = _patches(package, "first.Derived.save")
    patches.apply()
    first = _import(package, "first")
    assert (first.Derived().save(), first.Strategy().save()) == ("robust over stock", "stock")
    patches.remove()
    assert "save" not in vars(first.Derived)


def test_a_reloaded_module_is_patched_anew(package: str) -> None:
    patches = _patches(package, "first.plan")
    patches.apply()
    first = importlib.reload(_import(package, "first"))
    assert first.plan() == "robust over stock"
    patches.remove()
    assert first.plan() == "stock"


def test_what_others_replaced_meanwhile_is_theirs(package: str, caplog: pytest.LogCaptureFixture) -> None:
    patches = _patches(package, "first.plan")
    patches.apply()
    first = _import(package, "first")
    theirs = first.plan = lambda: "theirs"
    patches.remove()
    assert first.plan is theirs
    assert f"{package}.first.plan has been replaced by others" in caplog.text


def test_an_attribute_that_is_gone_is_named_unless_it_is_optional(
    package: str, caplog: pytest.LogCaptureFixture
) -> None:
    optional, asked_for = (
        _patches(package, "first.gone", "first.Gone.save", optional=True),
        _patches(package, "first.gone"),
    )
    optional.apply()
    _import(package, "first")
    assert caplog.text == ""
    asked_for.apply()
    assert f"{package}.first has no gone" in caplog.text
    optional.remove()
    asked_for.remove()


def test_a_replacement_that_cannot_be_made_leaves_the_import_whole(
    package: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make(original: Any) -> Any:
        raise LookupError("on purpose")

    patches = Patches([Patch(f"{package}.first", "plan", make)])
    patches.apply()
    assert _import(package, "first").plan() == "stock"
    assert "on purpose" in caplog.text
    patches.remove()


def test_a_module_that_fails_fails_as_ever(package: str) -> None:
    patches = _patches(package, "broken.plan")
    patches.apply()
    with pytest.raises(ImportError, match="of its own"):
        _import(package, "broken")
    with pytest.raises(ModuleNotFoundError):
        _import(package, "missing")
    patches.remove()


def test_a_module_whose_code_runs_is_patched_when_it_is_complete(package: str, tmp_path: Path) -> None:
    patches, others = _patches(package, "running.plan"), _patches(package, "running.name")
    sys.modules[f"{package}.give"] = given = ModuleType("give")
    given.apply = lambda: (patches.apply(), others.apply())  # type: ignore[attr-defined]
    (tmp_path / package / "running.py").write_text(
        f"from {package}.give import apply\napply()\ndef plan(): return 'stock'\ndef name(): return 'stock'\n"
    )
    running = _import(package, "running")
    assert (running.plan(), running.name()) == ("robust over stock", "robust over stock")
    assert type(running.__spec__).__name__ == "ModuleSpec"
    patches.remove()
    others.remove()
    assert (running.plan(), running.name()) == ("stock", "stock")


def test_two_hooks_of_one_module_both_see_it(package: str) -> None:
    outer, inner = _patches(package, "first.plan"), _patches(package, "first.Strategy.save")
    outer.apply()
    inner.apply()
    first = _import(package, "first")
    assert (first.plan(), first.Strategy().save()) == ("robust over stock", "robust over stock")
    outer.remove()
    inner.remove()


def test_threads_that_import_and_apply_at_once_patch_once(package: str) -> None:
    patches = _patches(package, "first.plan", "second.plan", "third.plan")
    barrier = threading.Barrier(6)

    def work(number: int) -> None:
        barrier.wait()
        if number % 2:
            patches.apply()
        else:
            _import(package, ("first", "second", "third")[number // 2])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plans = [_import(package, name).plan() for name in ("first", "second", "third")]
    assert plans == ["robust over stock"] * 3
    patches.remove()
    assert len({_import(package, name).plan for name in ("first", "second", "third")}) == 1


def test_install_refuses_a_planner_that_it_does_not_know() -> None:
    from robust_dcp.megatron import install

    with pytest.raises(ValueError, match=r"install\(planner='mcore'\): expected 'robust_dcp' or 'default'"):
        install("mcore")  # type: ignore[arg-type]


def _run_attributes(order: str, rank: int) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return run_python("-m", "tests.megatron.attributes", order, path=root, environment={"RANK": str(rank)})


def test_every_attribute_of_megatron_is_the_same_object_before_install_and_after_uninstall() -> None:
    done = _run_attributes("megatron_first", rank=0)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "is the planner of Megatron's checkpoints" in line]
    assert len(lines) == 1
    assert all(part in lines[0] for part in ("saves of torch_dist", "megatron-core ", "torch "))
    assert "has no" not in done.stderr


def test_no_attribute_of_megatron_is_ours_after_uninstall_if_megatron_came_after_install() -> None:
    done = _run_attributes("install_first", rank=1)
    assert done.returncode == 0, done.stderr
    assert "is the planner of" not in done.stderr


def test_the_planner_default_adds_the_arguments_and_replaces_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from robust_dcp.megatron import installation

    monkeypatch.setattr(installation, "_installed", installation._Installed())
    installation.install("default")
    assert set(installation._installed.patches) == {"arguments"}
    installation.uninstall()
    assert installation._installed.patches == {}


def test_the_line_goes_to_the_log_where_there_is_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from robust_dcp.megatron import installation

    monkeypatch.setattr(installation, "_installed", installation._Installed())
    monkeypatch.setenv("RANK", "0")
    caplog.set_level(logging.INFO, "robust_dcp")
    for _ in range(2):
        installation._announce(Patch("megatron.core.dist_checkpointing", "save", _robust))
    assert len([each for each in caplog.records if "is the planner of" in each.getMessage()]) == 1
    assert capsys.readouterr().err == ""


def test_the_document_lists_what_is_replaced() -> None:
    assert patch_table.table_in_document() == patch_table.table(), "python -m tests.megatron.patch_table"
