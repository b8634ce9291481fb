"""`robust-dcp convert` makes what other tools read, of any checkpoint, whole or not at all."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import robust_dcp
from robust_dcp.conversion.convert import Rules
from tests.cli.checkpoints import KINDS
from tests.cli.commands import Shell
from tests.harness.fingerprints import differences

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.complex128]


def state() -> dict[str, Any]:
    values = {str(dtype)[6:]: (torch.arange(35).reshape(7, 5) % 2).to(dtype) for dtype in DTYPES}
    return {
        "model": {**values, "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)},
        "optimizer": {"state": [{"m": torch.ones(3)}, {"m": torch.zeros(3)}], "groups": [{"lr": 0.1}]},
        "step": 7,
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    robust_dcp.save(state(), checkpoint_id=tmp_path / "source")
    return tmp_path / "source"


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name, file in index.items():
        with safe_open(model / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


@pytest.mark.parametrize("mmap", [True, False])
def test_torch_load_reads_the_nested_state_dict(source: Path, tmp_path: Path, shell: Shell, mmap: bool) -> None:
    assert shell("convert", source, tmp_path / "whole.pt", "--to", "torch").code == 0
    found = torch.load(tmp_path / "whole.pt", weights_only=True, mmap=mmap)
    assert differences(state(), found) == []
    assert zipfile.ZipFile(tmp_path / "whole.pt").testzip() is None


def test_a_flat_file_has_the_names_as_keys(source: Path, tmp_path: Path, shell: Shell) -> None:
    shell("convert", source, tmp_path / "flat.pt", "--to", "torch", "--flat", "--select", "optimizer.*")
    assert set(torch.load(tmp_path / "flat.pt")) == {
        *("optimizer.state.0.m", "optimizer.state.1.m", "optimizer.groups.0.lr")
    }


@pytest.mark.parametrize("whole", ["torch", "dcp"])
def test_a_file_of_torch_save_becomes_a_checkpoint_that_stock_loads(whole: str, tmp_path: Path, shell: Shell) -> None:
    torch.save(state(), tmp_path / "whole.pt")
    assert shell("convert", tmp_path / "whole.pt", tmp_path / "made", "--to", "dcp").code == 0
    assert shell("verify", tmp_path / "made").code == 0
    found = state()
    found["model"] = {name: torch.zeros_like(value) for name, value in found["model"].items()}
    found["step"] = 0
    load: Callable[..., object] = dcp.load if whole == "dcp" else robust_dcp.load
    load(found, checkpoint_id=tmp_path / "made", no_dist=True)
    assert differences(state(), found) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_checkpoint_can_be_converted_to_every_form(
    kind: str, originals: Path, tmp_path: Path, shell: Shell
) -> None:
    objects_left_out = ["--exclude", "*complex*"]
    for form in ("torch", "dcp", "safetensors"):
        ended = shell("convert", originals / kind, tmp_path / form, "--to", form, *objects_left_out)
        assert ended.code == 0, ended.err
    names = [each["name"] for each in shell("inspect", tmp_path / "dcp", "--json").json["items"] if each["dtype"]]
    assert shell("diff", originals / kind, tmp_path / "safetensors", *names, "--values").code == 0
    assert shell("diff", tmp_path / "dcp", tmp_path / "safetensors", *names, "--values").code == 0


def test_names_and_dtypes_change_as_asked(source: Path, tmp_path: Path, shell: Shell) -> None:
    options = ["--select", "model.float*", "--rename", "model.*=net.*.weight", "--dtype", "bfloat16"]
    options += ["--dtype", "net.float64.*=float32", "--exclude", "*float8*"]
    assert shell("convert", source, tmp_path / "model", "--to", "safetensors", *options).code == 0
    found = tensors_of(tmp_path / "model")
    assert {name: value.dtype for name, value in found.items()} == {
        "net.float64.weight": torch.float32,
        "net.float32.weight": torch.bfloat16,
        "net.float16.weight": torch.bfloat16,
    }
    assert torch.equal(found["net.float64.weight"], state()["model"]["float64"].float())


def test_a_model_is_cut_into_files_and_what_is_no_tensor_is_named(source: Path, tmp_path: Path, shell: Shell) -> None:
    ended = shell(
        "convert",
        source,
        tmp_path / "model",
        "--to",
        "safetensors",
        "--max-shard-size",
        "300B",
        "--exclude",
        "*complex*",
    )
    assert ended.code == 0 and "Left out" in ended.out and "step" in ended.out
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    expected = {f"model.{name}": value for name, value in state()["model"].items() if "complex" not in name}
    found = {name: value for name, value in tensors_of(tmp_path / "model").items() if name.startswith("model.")}
    assert differences(expected, found) == []


def test_two_items_with_one_name_are_refused_by_name(source: Path, tmp_path: Path, shell: Shell) -> None:
    ended = shell("convert", source, tmp_path / "model", "--to", "torch", "--rename", "model.*=same")
    assert ended.code == 2 and "'model." in ended.err and "both be called 'same'" in ended.err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--to", "safetensors", "--select", "model.complex128"], "cannot hold"),
        (["--to", "torch", "--select", "nothing"], "no item"),
        (["--to", "torch", "--dtype", "int9"], "int9"),
        (["--to", "torch", "--rename", "model"], "two sides"),
        (["--to", "torch", "--rename", "model=*"], "more *"),
        (["--to", "safetensors", "--max-shard-size", "many"], "no size"),
    ],
)
def test_what_cannot_be_made_is_said_and_nothing_is_left(
    options: list[str], word: str, source: Path, tmp_path: Path, shell: Shell
) -> None:
    ended = shell("convert", source, tmp_path / "target", *options)
    assert ended.code == 2 and word in ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_target_that_exists_stays_unless_forced(source: Path, tmp_path: Path, shell: Shell) -> None:
    for form, name in (("torch", "file"), ("dcp", "directory")):
        target = tmp_path / name
        assert shell("convert", source, target, "--to", form, "--select", "step").code == 0
        assert shell("convert", source, target, "--to", form).code == 2
        assert shell("convert", source, target, "--to", form, "--force").code == 0
    assert "model" in torch.load(tmp_path / "file")
    assert shell("diff", source, tmp_path / "directory", "--values").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"source", "file", "directory"}


def test_a_damaged_source_gives_nothing(source: Path, tmp_path: Path, shell: Shell) -> None:
    data = max(source.glob("*.distcp"), key=lambda path: path.stat().st_size)
    changed = bytearray(data.read_bytes())
    changed[changed.index(b"\x80\x3f")] ^= 1  # a value of a tensor
    data.write_bytes(changed)
    for form in ("torch", "dcp", "safetensors"):
        ended = shell("convert", source, tmp_path / form, "--to", form, "--exclude", "*complex*")
        assert ended.code == 2 and data.name in ended.err
        assert not (tmp_path / form).exists()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (self.path.touch, ())


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, shell: Shell) -> None:
    torch.save({"w": torch.ones(2), "evil": Evil(tmp_path / "executed")}, tmp_path / "evil.pt")
    ended = shell("convert", tmp_path / "evil.pt", tmp_path / "made", "--to", "dcp")
    assert ended.code == 2 and "refused" in ended.err
    (tmp_path / "noise.pt").write_bytes(b"noise" * 99)
    assert shell("convert", tmp_path / "noise.pt", tmp_path / "made", "--to", "dcp").code == 2
    assert not (tmp_path / "made").exists() and not (tmp_path / "executed").exists()


@pytest.mark.parametrize(("form", "is_directory"), [("torch", True), ("dcp", False)])
def test_a_target_of_the_other_kind_is_not_replaced(
    form: str, is_directory: bool, source: Path, tmp_path: Path, shell: Shell
) -> None:
    target = tmp_path / "there"
    target.mkdir() if is_directory else target.write_text("mine")
    ended = shell("convert", source, target, "--to", form, "--force")
    assert ended.code == 2 and "is not replaced" in ended.err
    assert target.is_dir() if is_directory else target.read_text() == "mine"


NAMES = st.text("ab.*", min_size=1, max_size=8)


@given(st.lists(NAMES, unique=True, max_size=6), st.lists(st.tuples(NAMES, NAMES), max_size=3))
def test_renaming_loses_no_item_and_invents_none(names: list[str], pairs: list[tuple[str, str]]) -> None:
    try:
        found = Rules(rename=tuple(pairs)).names(names)
    except ValueError:
        return
    assert sorted(found.values()) == sorted(names)
    for new, old in found.items():
        fits = [right for left, right in pairs if Rules(rename=((left, "#" + left),)).renamed(old) != old]
        assert new == old if not fits else all(part in new for part in fits[0].split("*"))


def test_a_pattern_that_no_item_fits_is_told(source: Path, tmp_path: Path, shell: Shell) -> None:
    words = ["--select", "model.*", "--rename", "modle.*=*", "--rename", "model.*=*", "--dtype", "scaler=bfloat16"]
    ended = shell("convert", source, tmp_path / "target", "--to", "dcp", *words)
    assert ended.code == 0
    said = [line for line in ended.err.splitlines() if line.startswith("No item")]
    assert said == ["No item has a name that fits modle.*", "No item has a name that fits scaler"]


def test_config_and_tokenizer_are_copied_beside_the_weights(source: Path, tmp_path: Path, shell: Shell) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model-00009-of-00009.safetensors",
        "x.bin",
    ):
        (base / name).write_text(name)
    words = ["--to", "safetensors", "--exclude", "*complex*"]
    assert shell("convert", source, tmp_path / "model", *words, "--config", base).code == 0
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "tokenizer.json"),
        *("model-00001-of-00001.safetensors", "model.safetensors.index.json"),
    }
    for wrong in (tmp_path / "nowhere", source):
        ended = shell("convert", source, tmp_path / "other", *words, "--config", wrong)
        assert ended.code == 2 and "there is no config.json" in ended.err
    ended = shell("convert", source, tmp_path / "other.pt", "--to", "torch", "--config", base)
    assert ended.code == 2 and "--config is for --to safetensors" in ended.err
