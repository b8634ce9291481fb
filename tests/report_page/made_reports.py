"""Reports of runs that nobody has made, for the page: many ranks, slow nodes, changed structures, hostile names."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np

from robust_dcp.plan.save_report import find_stragglers, module_sizes
from robust_dcp.report import (
    REPORT_NAME,
    LoadBefore,
    PhaseReport,
    PlanReport,
    Ranks,
    SavedReport,
    StructureDiff,
    encode_report,
)
from robust_dcp.report_page.reading import FoundReport, Reports

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">"
_MIB = 1 << 20


def made_report(step: int, world_size: int, *, slow: tuple[int, ...] = ()) -> SavedReport:
    """The report of one save by nodes of 8 ranks; those in ``slow`` write at a fifth of the others' rate."""
    draw = random.Random(step)
    nbytes = tuple(256 * _MIB + draw.randrange(8 * _MIB) for _ in range(world_size))
    rates = [1.6e9 * draw.lognormvariate(0, 0.08) / (5 if rank in slow else 1) for rank in range(world_size)]
    write = tuple(round(size / rate, 6) for size, rate in zip(nbytes, rates, strict=True))
    ranks = Ranks(
        rank=tuple(range(world_size)),
        node=tuple(rank // 8 for rank in range(world_size)),
        plan_seconds=tuple(round(0.03 + 0.02 * draw.random(), 6) for _ in range(world_size)),
        stage_seconds=(0.0,) * world_size,
        write_seconds=write,
        nbytes=nbytes,
        files=(2,) * world_size,
        how=tuple(int(rank in slow) for rank in range(world_size)),
    )
    nodes = tuple(f"gpu-{number:04d}.cluster.example" for number in range(-(-world_size // 8)))
    added = (f"model.layers.{step}.lora.a", HOSTILE)
    changes = StructureDiff(added=added, changed={"model.head.weight": "float32[32000, 4096] -> bfloat16[32000, 4096]"})
    plan = PlanReport("reused", "no rank's structure has changed")
    return SavedReport(
        save_id=f"{step:08d}-0000-4000-8000-000000000000",
        checkpoint=f"/checkpoints/run/step_{step}",
        saved_at_seconds=1.78e9 + 60 * step,
        seconds=round(0.05 + max(write) + 0.02, 6),
        world_size=world_size,
        total_nbytes=sum(nbytes),
        versions={"robust_dcp": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        phases=(PhaseReport("plan", 0.05), PhaseReport("write", max(write)), PhaseReport("commit", 0.02)),
        plan=PlanReport("rebuilt", "2 ranks have changed", changes) if step % 500 == 0 else plan,
        nodes=nodes,
        ways=(("direct",), ("buffered: the file system refuses O_DIRECT: Invalid argument",)),
        ranks=ranks,
        stragglers=find_stragglers(ranks, nodes),
        loads=_LOADS if step % 700 == 0 else (),
        modules=module_sizes(*_model()),
    )


_LOADS = (
    LoadBefore("base", 1.0, 40.5),
    LoadBefore(HOSTILE, 1.78e9, 12.5, _MIB, (PhaseReport("read", 12),), (HOSTILE,)),
)


def _model() -> tuple[list[str], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """The names and sizes of a model with its optimizer."""
    names = {f"model.layers.{layer}.{part}.weight": 4096 * 4096 for layer in range(32) for part in ("attention", "mlp")}
    names |= {f"optimizer.state.{name}.{what}": 2 * size for name, size in names.items() for what in "mv"}
    names[f"model.{HOSTILE}"] = 40_000_000
    return list(names), np.array(list(names.values()), dtype=np.int64)


def hostile_reports(wait: str = HOSTILE) -> Reports:
    """One report, all of whose texts are markup."""
    report = made_report(500, 4, slow=(3,))
    report = msgspec.structs.replace(
        report,
        checkpoint=HOSTILE,
        nodes=(HOSTILE,),
        ways=((HOSTILE,), (HOSTILE,)),
        waits=(HOSTILE, wait),
        fallbacks=(HOSTILE,),
        identical_to=HOSTILE,
        loads=_LOADS,
        versions={HOSTILE: HOSTILE},
        plan=msgspec.structs.replace(report.plan, outcome="constructor", reason=HOSTILE),
    )
    return Reports(HOSTILE, (FoundReport(HOSTILE, report),))


def put_report(directory: Path, report: SavedReport) -> Path:
    """A directory that looks like a checkpoint with this report."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ".metadata").write_bytes(b"\x80\x02X" + report.save_id.encode() + b".")
    (directory / REPORT_NAME).write_bytes(encode_report(report))
    return directory


def put_run(root: Path, world_size: int, n_checkpoints: int) -> Path:
    """Checkpoints of a run. In the newest, some ranks are slow."""
    for number in range(1, n_checkpoints + 1):
        is_newest = number == n_checkpoints
        slow = (3,) if world_size <= 16 else (*range(40, 48), world_size - 3)
        report = made_report(100 * number, world_size, slow=slow if is_newest or number % 7 == 0 else ())
        put_report(root / f"step_{100 * number}", report)
    return root
