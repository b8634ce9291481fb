"""`robust-dcp convert` makes what other tools read, of any checkpoint, whole or not at all, in bounded memory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import threading
import weakref
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import robust_dcp
from robust_dcp import RobustReader, RobustWriter
from robust_dcp.conversion import convert
from robust_dcp.storage.options import LAYOUTS
from robust_dcp.storage.pieces import Piece, PieceReader
from tests.cli.checkpoints import KINDS
from tests.cli.commands import shell
from tests.faults.disk import FaultDisk
from tests.harness.fingerprints import differences
from tests.harness.ranks import run_ranks, values
from tests.storage.forged import Call

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


@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
def test_a_disk_that_fills_up_at_any_moment_is_an_error_with_path_and_number(form: Any, tmp_path: Path) -> None:
    """Here a limit of the size of files ends a write in the middle, as a full disk does."""
    robust_dcp.save({f"w{number}": torch.ones(30_000) for number in range(4)}, checkpoint_id=tmp_path / "source")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1_000, 100_000, 200_000, 350_000, 479_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(robust_dcp.StorageError) as caught:
                convert(tmp_path / "source", tmp_path / "made", form=form)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG and str(tmp_path / "made") in str(caught.value), limit
        assert [each.name for each in tmp_path.iterdir()] == ["source"]
    with FaultDisk(tmp_path, on={"allocate:*": OSError(errno.ENOSPC, ""), "write:*": OSError(errno.ENOSPC, "")}):
        ended = shell("convert", tmp_path / "source", tmp_path / "made", "--to", form)
    if form == "torch" and ended.code == 0:  # what torch maps is not written by functions that a test can replace
        return
    assert ended.code == 2 and "needs more than 480000 bytes" in ended.err and "bytes are free" in ended.err


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    """What readers of Hugging Face models find: by way of the index."""
    index = json.loads((model / "model.safetensors.index.json").read_text())
    files = {name: load_file(model / name) for name in set(index["weight_map"].values())}
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def test_every_type_of_the_installed_safetensors_is_converted_and_loaded(tmp_path: Path) -> None:
    values: dict[str, torch.Tensor] = {}
    for name, dtype in vars(torch).items():
        if isinstance(dtype, torch.dtype) and dtype.itemsize == 1 and not dtype.is_complex:
            raw = torch.arange(24, dtype=torch.uint8).reshape(2, 12)
            with contextlib.suppress(Exception):  # a type that safetensors does not have
                value = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
                save_file({name: value}, tmp_path / "one.safetensors")
                values[name] = value

    def bytes_of(values: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: (value.dtype, value.shape, value.view(torch.uint8).tolist()) for name, value in values.items()}

    assert {"float8_e4m3fn", "float8_e8m0fnu", "int8"} <= values.keys()
    (tmp_path / "model").mkdir()
    save_file(values, tmp_path / "model" / "model.safetensors")
    robust_dcp.save(values, checkpoint_id=tmp_path / "saved")
    assert shell("convert", tmp_path / "saved", tmp_path / "made", "--to", "safetensors").code == 0
    assert bytes_of(tensors_of(tmp_path / "made")) == bytes_of(values)
    for source in ("model", "made", "saved"):
        target = {name: torch.zeros(value.view(torch.uint8).shape, dtype=torch.uint8) for name, value in values.items()}
        target = {name: each.view(values[name].dtype) for name, each in target.items()}
        robust_dcp.load(target, checkpoint_id=tmp_path / source)
        assert bytes_of(target) == bytes_of(values)
        assert shell("inspect", tmp_path / source).code == 0


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_torch_load_reads_the_state_dict_nested_or_flat(source: Path, tmp_path: Path) -> None:
    assert shell("convert", source, tmp_path / "whole.pt", "--to", "torch").code == 0
    for mmap in (True, False):
        assert differences(state(), torch.load(tmp_path / "whole.pt", weights_only=True, mmap=mmap)) == []
    assert zipfile.ZipFile(tmp_path / "whole.pt").testzip() is None
    shell("convert", source, tmp_path / "flat.pt", "--to", "torch", "--flat", "--select", "optimizer.*")
    flat = torch.load(tmp_path / "flat.pt")
    assert set(flat) == {"optimizer.state.0.m", "optimizer.state.1.m", "optimizer.groups.0.lr"}


def tensors_of_many_kinds() -> dict[str, Any]:
    whole = torch.randn(40, 30)
    return {
        **state(),
        "turned": whole.t(),
        "half": whole[20:],
        "tied": whole,
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    }


def test_a_file_of_torch_save_becomes_a_checkpoint_that_stock_and_ours_load_and_a_file_again(tmp_path: Path) -> None:
    torch.save(tensors_of_many_kinds(), tmp_path / "whole.pt")
    assert shell("convert", tmp_path / "whole.pt", tmp_path / "made", "--to", "dcp").code == 0
    assert shell("verify", tmp_path / "made").code == 0
    meta = RobustReader(tmp_path / "made").read_metadata().storage_meta
    assert meta is not None and meta.checkpoint_id == str(tmp_path / "made")
    loads: tuple[Callable[..., object], ...] = (dcp.load, robust_dcp.load)
    for load in loads:
        found = state()
        found["model"] = {name: torch.zeros_like(value) for name, value in found["model"].items()}
        found["step"] = 0
        load(found, checkpoint_id=tmp_path / "made", no_dist=True)
        assert differences(state(), found) == []
    assert shell("convert", tmp_path / "made", tmp_path / "back.pt", "--to", "torch").code == 0
    both = torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "back.pt")
    for each in both:
        each["sparse"], each["quantized"] = each["sparse"].to_dense(), each["quantized"].dequantize()
        each["conjugate"] = each["conjugate"].resolve_conj()
    assert differences(*both) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_checkpoint_can_be_converted_to_every_form(kind: str, originals: Path, tmp_path: Path) -> None:
    rules = () if kind == "megatron" else ("--exclude", "*complex*")
    for form in ("torch", "dcp", "safetensors"):
        ended = shell("convert", originals / kind, tmp_path / form, "--to", form, *rules)
        assert ended.code == 0, ended.err
    names = [each["name"] for each in shell("inspect", tmp_path / "dcp", "--json").json["items"] if each["dtype"]]
    assert shell("diff", originals / kind, tmp_path / "safetensors", *names, "--values").code == 0
    assert shell("diff", tmp_path / "dcp", tmp_path / "safetensors", *names, "--values").code == 0


def save_shards(path: str) -> dict[str, torch.Tensor]:
    """DTensors cut along one and two dimensions, replicas, a plain tensor; no integers, which stock cannot merge."""
    size = dist.get_world_size()
    line, grid = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))
    whole = {name: torch.randn(13, 1024, generator=torch.Generator().manual_seed(1)) for name in "abcd"}
    state_dict = {
        "a": distribute_tensor(whole["a"], line, [Shard(0)]),
        "b": distribute_tensor(whole["b"].bfloat16(), line, [Shard(1)]),
        "c": distribute_tensor(whole["c"], grid, [Shard(0), Shard(1)]),
        "d": distribute_tensor(whole["d"], line, [Replicate()]),
        "plain": torch.ones(5),
    }
    for layout in LAYOUTS.values():
        robust_dcp.save(state_dict, storage_writer=RobustWriter(f"{path}/{layout.name}", layout=layout.name))
        if dist.get_rank() == 0:
            convert(f"{path}/{layout.name}", f"{path}/dcp {layout.name}", form="dcp")
            convert(f"{path}/dcp {layout.name}", f"{path}/{layout.name}.hf", form="safetensors", buffer_nbytes=1 << 15)
    return {**whole, "b": whole["b"].bfloat16(), "plain": torch.ones(5)}


def test_what_ranks_hold_in_shards_becomes_whole_tensors_and_stocks_own_tool_consolidates_them(tmp_path: Path) -> None:
    expected, *_ = values(run_ranks(4, save_shards, str(tmp_path)))
    for layout in LAYOUTS.values():
        assert differences(expected, tensors_of(tmp_path / f"{layout.name}.hf")) == []
    stocks = pytest.importorskip("torch.distributed.checkpoint._consolidate_hf_safetensors")  # not in torch 2.7
    places = str(tmp_path / "safetensors"), str(tmp_path)
    stocks.consolidate_safetensors_files(*places, fqn_to_index_mapping=dict.fromkeys(expected, 1))
    assert differences(expected, load_file(tmp_path / "model-00001-of-00001.safetensors")) == []


def test_names_and_dtypes_change_as_asked(source: Path, tmp_path: Path) -> None:
    options = ["--select", "model.float*", "--rename", "model.*=net.*.weight", "--dtype", "bfloat16"]
    options += ["--dtype", "net.float64.*=float32", "--exclude", "*float8*"]
    ended = shell("convert", source, tmp_path / "model", "--to", "safetensors", *options)
    assert ended.code == 0
    found = tensors_of(tmp_path / "model")
    assert {name: value.dtype for name, value in found.items()} == {
        "net.float64.weight": torch.float32,
        "net.float32.weight": torch.bfloat16,
        "net.float16.weight": torch.bfloat16,
    }
    assert torch.equal(found["net.float64.weight"], state()["model"]["float64"].float())
    for option in ("--select", "--exclude", "--rename", "--dtype"):
        ended = shell("convert", source, tmp_path / "again", "--to", "torch", option, "modle.*=bfloat16")
        assert ended.code == 2 and f"{option}: no item has a name that 'modle.*" in ended.err


def test_a_model_is_cut_into_files_and_what_is_no_tensor_is_named(source: Path, tmp_path: Path) -> None:
    words = ("--to", "safetensors", "--max-shard-size", "300B", "--exclude", "*complex*")
    ended = shell("convert", source, tmp_path / "model", *words)
    assert ended.code == 0 and "Left out" in ended.out and "step" in ended.out
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    expected = {f"model.{name}": value for name, value in state()["model"].items() if "complex" not in name}
    found = {name: value for name, value in tensors_of(tmp_path / "model").items() if name.startswith("model.")}
    assert differences(expected, found) == []
    lost = min((tmp_path / "model").glob("*.safetensors"))
    lost.unlink()  # as in a download that was cut off
    assert f"found no {lost.name}" in shell("convert", tmp_path / "model", tmp_path / "again", "--to", "dcp").err


def test_config_and_tokenizer_are_copied_beside_the_weights(source: Path, tmp_path: Path) -> None:
    base, beside = tmp_path / "base", ("config.json", "generation_config.json", "tokenizer.json")
    base.mkdir()
    for name in (*beside, "model-00009-of-00009.safetensors", "x.bin"):
        (base / name).write_text(name)
    words = ["--to", "safetensors", "--exclude", "*complex*"]
    assert shell("convert", source, tmp_path / "model", *words, "--config", base).code == 0
    weights = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    assert names_in(tmp_path / "model") == {*beside, *weights}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--to", "safetensors", "--select", "model.complex128"], "safetensors has no type for"),
        (["--to", "torch", "--exclude", "*"], "holds no item that --select and --exclude let through"),
        (["--to", "torch", "--dtype", "int9"], "int9"),
        (["--to", "torch", "--dtype", "float4_e2m1fn_x2"], "is no floating dtype"),
        (["--to", "torch", "--rename", "model"], "two sides"),
        (["--to", "torch", "--rename", "model=*"], "more *"),
        (["--to", "torch", "--rename", "model.*=same"], "both be called 'same'"),
        (["--to", "safetensors", "--max-shard-size", "many"], "no size"),
        (["--to", "safetensors", "--exclude", "*complex*", "--config", "nowhere"], "there is no config.json"),
        (["--to", "torch", "--config", "."], "--config is for --to safetensors"),
        (["--to", "dcp", "--flat"], "--flat is for --to torch"),
        (["--to", "torch", "--layout", "safetensors"], "--layout is for --to dcp"),
    ],
)
def test_what_cannot_be_made_is_said(options: list[str], word: str, source: Path, tmp_path: Path) -> None:
    ended = shell("convert", source, tmp_path / "target", *options)
    assert ended.code == 2 and word in ended.err and names_in(tmp_path) == {"source"}


def test_a_target_stays_unless_forced_and_one_of_another_kind_always(source: Path, tmp_path: Path) -> None:
    for form, name in (("torch", "file"), ("dcp", "directory")):
        target = tmp_path / name
        assert shell("convert", source, target, "--to", form, "--select", "step").code == 0
        assert shell("convert", source, target, "--to", form).code == 2
        assert shell("convert", source, target, "--to", form, "--force").code == 0
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory/step_1").mkdir()  # as in the output directory of a trainer, beside its model
    for form, names in (("dcp", ("file", ".", "directory")), ("torch", ("directory", "link", "pipe"))):
        for name in names:
            ended = shell("convert", source, tmp_path / name, "--to", form, "--force")
            assert ended.code == 2 and "is not replaced" in ended.err
    assert "model" in torch.load(tmp_path / "file")
    assert shell("diff", source, tmp_path / "directory", "--values").code == 0
    assert names_in(tmp_path) == {"source", "file", "directory", "link", "pipe"}


def test_a_damaged_source_gives_nothing(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"a": torch.ones(9), "b": torch.arange(3.0) + 1, "complex": 1}, file)
    for path in (max(source.glob("*.distcp"), key=lambda path: path.stat().st_size), file):
        changed = bytearray(path.read_bytes())
        changed[changed.index(b"\x80\x3f")] ^= 1  # a value of a tensor
        path.write_bytes(changed)
    ours = [(source, "torch", ".distcp"), (source, "dcp", ".distcp"), (source, "safetensors", ".distcp")]
    for path, form, named in (*ours, (file, "dcp", "data/0")):
        ended = shell("convert", path, tmp_path / form, "--to", form, "--exclude", "*complex*")
        assert ended.code == 2 and named in ended.err and not (tmp_path / form).exists()


@pytest.mark.parametrize("content", [b"x\n", b"", b"PK\x03\x04 and so on", bytes(100), None])
def test_a_file_of_another_kind_or_one_that_would_run_code_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is None:
        evil = {"w": torch.ones(2), "evil": [Call(os.mkdir, str(tmp_path / "executed"))]}
        torch.save(evil, tmp_path / "file")
        dcp.save(evil, checkpoint_id=tmp_path / "checkpoint")
        ended = shell("convert", tmp_path / "checkpoint", tmp_path / "made", "--to", "torch")
        assert ended.code == 2 and "leave it out: --exclude 'evil'" in ended.err
    else:
        (tmp_path / "file").write_bytes(content)
    ended = shell("convert", tmp_path / "file", tmp_path / "made", "--to", "dcp")
    assert ended.code == 2
    assert ("expected a file of torch.save" if content is not None else f"{os.name}.mkdir") in ended.err
    assert "weights_only` set to `False`" not in ended.err  # no advice to read it with less care
    assert "made" not in names_in(tmp_path)


@pytest.mark.parametrize(
    ("form", "layout"), [("dcp", "torch"), ("dcp", "safetensors"), ("safetensors", "torch"), ("torch", "torch")]
)
def test_few_pieces_are_in_memory_at_a_time(
    form: Any, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"large": torch.rand(24, 1 << 18), **{f"w{number}": torch.rand(300, 1000) for number in range(9)}}
    robust_dcp.save(large, checkpoint_id=tmp_path / "source")
    alive: list[weakref.ref[torch.Tensor]] = []
    most_nbytes = 0
    read, lock = PieceReader.read, threading.Lock()

    def watched(self: PieceReader, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        nonlocal most_nbytes
        values = read(self, pieces)
        with lock:
            alive.extend(map(weakref.ref, values))
            most_nbytes = max(most_nbytes, sum(value.nbytes for each in alive if (value := each()) is not None))
        return values

    monkeypatch.setattr(PieceReader, "read", watched)
    convert(tmp_path / "source", tmp_path / "made", form=form, layout=layout, buffer_nbytes=4 << 20)
    assert len(alive) > 20
    assert most_nbytes <= 6 << 20  # two threads write, each with half of the buffer, while as much is read
