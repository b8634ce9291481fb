"""Measures loads that cut tensors in another way than they were saved, by ours and by stock, and proofs, in one run.

Run it for a table: ``python -m benchmarks.reshards --mib 128 --json reshards.json``. Four ranks save tensors cut into
rows, columns, a grid of both, or not at all. One of two ranks (of four in a grid) loads its part in each of these ways,
with torch's "fake" process group for the others. Experts are tensors ``[E, h, f]`` whose rows are experts, and whose
columns lie along f. Each cell is the better of two loads that follow one that does not count, in CPU seconds (user and
system time) for each GiB that is wanted. The files are in the page cache, or with ``--cold`` not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import warnings
from itertools import product
from typing import Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import robust_dcp
from benchmarks.measuring import Row, Stopwatch, evict, in_new_process, run, show, with_ratios, write_json

__all__ = ["main"]

_CUTS: Final = ("rows", "columns", "grid", "whole")
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
_KINDS: Final = ("large", "small", "experts")
_N_SMALL: Final = 512
_COLUMNS: Final = {
    "saved": "saved",
    "loaded": "loaded",
    "kind": "tensors",
    "dtype": "dtype",
    "ours": "ours, CPU-s/GiB",
    "stock": "stock",
    "ratio": "times less",
    "wall_ratio": "wall time",
    "prove": "prove, CPU-s/GiB",
    "peak_mib": "load, peak MiB",
    "prove_peak_mib": "prove, peak MiB",
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--mib", type=int, default=128, help="of large tensors and of experts, each (default: %(default)s)"
    )
    parser.add_argument("--directory", help="where to save (default: the system's temporary directory)")
    parser.add_argument("--cold", action="store_true", help="take the files out of the page cache before each load")
    parser.add_argument("--json", help="write all figures there as well")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for saved in _CUTS:
        with tempfile.TemporaryDirectory(prefix="reshards-", dir=arguments.directory) as directory:
            print(f"saved by {saved} ...", file=sys.stderr)
            run(4, _save, directory, saved, arguments.mib)
            for loaded in _CUTS:
                cells = in_new_process(_measure, directory, loaded, arguments.mib, arguments.cold)
                rows += [{"saved": saved, **cell} for cell in cells]
    with_ratios(rows, ("saved", "loaded", "kind", "dtype"), {"ratio": "cpu_seconds", "wall_ratio": "wall_seconds"})
    of = {who: {_cell(row): row for row in rows if row["who"] == who} for who in ("stock", "ours", "prove")}
    ours = [
        row
        | {"ours": row["per_gib"], "stock": of["stock"][cell]["per_gib"]}
        | {"prove": of["prove"][cell]["per_gib"], "prove_peak_mib": of["prove"][cell]["peak_mib"]}
        for cell, row in of["ours"].items()
    ]
    show(_COLUMNS, ours)
    ratios = [row["ratio"] for row in ours]
    worst = min(ours, key=lambda row: float(row["ratio"]))
    print(
        f"median {statistics.median(ratios):.2f} times less CPU than stock; the worst cell {min(ratios):.2f}: {worst}"
    )
    alike = [row["prove"] for row in ours if row["saved"] == row["loaded"] and row["kind"] != "small"]
    otherwise = [row["prove"] / row["ours"] for row in ours if row["saved"] != row["loaded"]]
    more = max(row["prove_peak_mib"] - row["peak_mib"] for row in ours)
    print(
        f"prove: cut alike {statistics.median(alike):.3f} CPU-s/GiB in the median, {max(alike):.3f} at most; cut "
        f"otherwise {statistics.median(otherwise):.2f} of a load in the median, {max(otherwise):.2f} at most; at most "
        f"{more:.0f} MiB more memory than a load"
    )
    write_json(arguments.json, ours)


def _cell(row: Row) -> tuple[str, ...]:
    return row["saved"], row["loaded"], row["kind"], row["dtype"]


def _shapes(kind: str, dtype: torch.dtype, mib: int) -> list[tuple[int, ...]]:
    numel = (mib << 20) // dtype.itemsize
    if kind == "large":
        return [(4096, numel // 4 // 4096)] * 4
    if kind == "experts":
        return [(16, 512, numel // 4 // 16 // 512)] * 4
    return [(128, 64)] * _N_SMALL


def _state_dict(cut: str, kind: str, dtype: torch.dtype, mib: int) -> dict[str, torch.Tensor]:
    """What a rank holds of tensors that are cut in this way: DTensors of random bytes."""
    mesh_of = _mesh_of(cut)
    mesh = DeviceMesh("cpu", torch.arange(torch.Size(mesh_of).numel()).reshape(mesh_of))
    state: dict[str, torch.Tensor] = {}
    for number, shape in enumerate(_shapes(kind, dtype, mib)):
        last = len(shape) - 1
        ways: dict[str, list[Placement]] = {
            "rows": [Shard(0)],
            "columns": [Shard(last)],
            "grid": [Shard(0), Shard(last)],
            "whole": [Replicate()],
        }
        placements = ways[cut]
        local = list(shape)
        for size, placement in zip(mesh_of, placements, strict=True):
            if isinstance(placement, Shard):
                local[placement.dim] //= size
        data = torch.zeros(torch.Size(local), dtype=torch.uint8).to(dtype)
        data.view(torch.uint8).random_(0, 100)
        state[f"weight.{number}"] = DTensor.from_local(data, mesh, placements, run_check=False)
    return state


def _mesh_of(cut: str) -> tuple[int, ...]:
    ranks = dist.get_world_size()
    return (2, ranks // 2) if cut == "grid" else (ranks,)


def _save(directory: str, cut: str, mib: int) -> None:
    for kind, dtype in product(_KINDS, _DTYPES):
        planner = robust_dcp.RobustPlanner(on_structure_change="quiet")
        robust_dcp.save(
            _state_dict(cut, kind, dtype, mib), checkpoint_id=f"{directory}/{kind} {dtype}", planner=planner
        )


def _measure(directory: str, loaded: str, mib: int, is_cold: bool) -> list[Row]:
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4 if loaded == "grid" else 2)
    rows: list[Row] = []
    for kind, dtype in product(_KINDS, _DTYPES):
        wanted, path = _state_dict(loaded, kind, dtype, mib), f"{directory}/{kind} {dtype}"
        gib = sum(value.to_local().nbytes for value in wanted.values() if isinstance(value, DTensor)) / (1 << 30)
        for who, load in (("stock", dcp.load), ("ours", robust_dcp.load), ("prove", _prove)):
            best: Row = {}
            for turn in range(3):
                if is_cold:
                    evict(path)
                watch = Stopwatch()
                watch.start()
                load(wanted, checkpoint_id=path, no_dist=True)
                watch.stop()
                if turn and (not best or watch.cpu_seconds < best["cpu_seconds"]):
                    best = watch.figures()
            cell = {"loaded": loaded, "kind": kind, "dtype": str(dtype).partition(".")[2], "who": who}
            rows.append({**cell, **best, "per_gib": best["cpu_seconds"] / gib})
    return rows


def _prove(wanted: dict[str, torch.Tensor], *, checkpoint_id: str, no_dist: bool) -> None:
    """Of what a load has put there."""
    robust_dcp.prove(wanted, checkpoint_id=checkpoint_id, no_dist=no_dist).raise_if_differs()


if __name__ == "__main__":
    main()
