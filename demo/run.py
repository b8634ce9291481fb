"""The demo: ``python demo/run.py``. It saves a Megatron-Core and an FSDP2 model, and proves that stock code loads them.

It runs the jobs one after the other in a temporary directory, and shows what they did. It exits with 0 only if every
claim of ``verdict`` holds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.evidence import read_evidence
from demo.launch import JobFailed, torchrun
from demo.tables import nbytes_in_words, table
from demo.verdict import Claim, about_a_changed_tensor, about_loads, about_lost_keys, about_saves

_RERUN_STATE = "rerun_state_machine_state"
_SAVED_MESH_LOADS = {(number, "4 ranks") for number in (1, 2, 3, 4)}


def main() -> int:
    """Run everything. Returns the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keep", type=Path, metavar="DIR", help="work in this new directory and leave it there")
    keep: Path | None = arguments.parse_args().keep
    begin = time.perf_counter()
    try:
        if keep is not None:
            keep.mkdir(parents=True)
            claims = [*_megatron(keep), *_fsdp(keep)]
        else:
            with tempfile.TemporaryDirectory(prefix="robust-dcp-demo-") as work:
                claims = [*_megatron(Path(work)), *_fsdp(Path(work))]
    except JobFailed as error:
        print(f"\nNOT PROVED: {error}")
        return 1
    return _conclude(claims, time.perf_counter() - begin)


def _megatron(work: Path) -> list[Claim]:
    print("\nMegatron-Core: MoE GPT model, distributed optimizer, 4 ranks on CPU")
    _run("megatron_save", work, ranks=4)
    saved = read_evidence(work, "megatron_save")
    print(f"  Megatron-Core {saved['megatron']}, {saved['layout']}, {_losses(saved['saves'])}\n")
    _show_saves(saved["saves"], "stock, cached_metadata=True")
    _run("megatron_load", work, ranks=4)
    loaded = read_evidence(work, "megatron_load")
    _show_loads("stock Megatron", loaded["loads"])
    layout = saved["layout"]
    expected = {(1, layout), (2, layout), (3, layout), (3, "TP2 x PP1 x EP2"), (3, "TP1 x PP1 x EP4")}
    print(f"  keys missing from the third checkpoint: robust_dcp {loaded['lost']['robust']}")
    print(f"                                          stock      {loaded['lost']['stock']}")
    return [
        *about_saves("Megatron", saved["saves"], _RERUN_STATE),
        *about_loads(
            f"stock Megatron-Core {saved['megatron']}", loaded, expected, layout_bound=("rng_state", _RERUN_STATE)
        ),
        *about_lost_keys(loaded["lost"], _RERUN_STATE),
    ]


def _fsdp(work: Path) -> list[Claim]:
    print("\nFSDP2: fully_shard and AdamW, 4 ranks on CPU")
    _run("fsdp_save", work, ranks=4)
    saved = read_evidence(work, "fsdp_save")
    print(f"  torch {saved['torch']}, {_losses(saved['saves'])}\n")
    _show_saves(saved["saves"], "stock, enable_plan_caching=True")
    for ranks in (4, 2):
        _run("fsdp_load", work, ranks=ranks)
    on_4, on_2 = read_evidence(work, "fsdp_load_4"), read_evidence(work, "fsdp_load_2")
    _show_loads("stock DCP", [*on_4["loads"], *on_2["loads"]])
    weights = on_4["loss_weights"]
    print(f"  loss_weights in the fourth checkpoint: saved {weights['saved']}, through stock's converter:")
    print(f"    from robust_dcp's {weights['robust']}, from stock's {weights['stock']}")
    reader = f"stock DCP of torch {saved['torch']}"
    return [
        *about_saves("FSDP2", saved["saves"], "ema"),
        *about_loads(f"{reader}, 4 ranks", on_4, _SAVED_MESH_LOADS | {(n, "2 x 2 ranks") for n in (3, 4)}),
        *about_loads(f"{reader}, 2 ranks", on_2, {(n, "2 ranks") for n in (3, 4)}),
        *about_a_changed_tensor(saved["saves"][3], "loss_weights", weights),
    ]


def _run(job: str, work: Path, *, ranks: int) -> None:
    finished = torchrun(job, work, ranks=ranks)
    print(f"\n  $ {finished.command}    {finished.seconds:.1f} s, starting Python included")


def _losses(saves: list[dict[str, Any]]) -> str:
    return "trained on real text, loss before each save: " + ", ".join(f"{save['loss']:.2f}" for save in saves)


def _show_saves(saves: list[dict[str, Any]], stock: str) -> None:
    rows = [
        (
            str(number),
            report["plan"],
            str(report["items"]),
            nbytes_in_words(sum(rank["nbytes"] for rank in report["ranks"])),
            f"{max(rank['call_seconds'] for rank in report['ranks']):.3f}",
            f"{save['stock_seconds']:.3f}",
        )
        for number, save in enumerate(saves, start=1)
        for report in [save["report"]]
    ]
    print(table(("save", "plan", "items", "written", "seconds", f"seconds ({stock})"), rows))
    print("")
    phases = [
        (
            str(number),
            phase["name"],
            f"{phase['seconds']:.3f}",
            str(phase["exchanges"]),
            str(sum(rank["phases"][place]["messages"] for rank in save["report"]["ranks"])),
            nbytes_in_words(sum(rank["phases"][place]["sent_nbytes"] for rank in save["report"]["ranks"])),
        )
        for number, save in enumerate(saves, start=1)
        for place, phase in enumerate(save["report"]["phases"])
    ]
    print(table(("save", "phase", "seconds", "exchanges", "messages", "sent (all ranks)"), phases))
    print("")
    for number, save in enumerate(saves, start=1):
        print(f"  save {number}: plan {save['report']['plan']}: {save['report']['reason']}")


def _show_loads(reader: str, loads: list[dict[str, Any]]) -> None:
    rows = [
        (
            str(load["save"]),
            load["layout"],
            str(load["n_keys"]),
            nbytes_in_words(load["nbytes"]),
            "equal" if not load["differing"] else f"DIFFERS: {load['differing'][:3]}",
        )
        for load in loads
    ]
    print(table(("save", f"loaded by {reader} into", "keys", "compared", "bit for bit"), rows))


def _conclude(claims: list[Claim], seconds: float) -> int:
    print("\nClaims")
    for claim in claims:
        print(f"  [{'holds' if claim.holds else 'FAILS'}] {claim.sentence}")
    failed = [claim.sentence for claim in claims if not claim.holds]
    if failed:
        print(f"\nNOT PROVED ({seconds:.0f} s): {len(failed)} of {len(claims)} claims fail: " + "; ".join(failed))
        return 1
    print(
        f"\nPROVED ({seconds:.0f} s, {len(claims)} claims): robust_dcp saved a Megatron-Core MoE model and an FSDP2 "
        "model, planned once, reused the plan, and noticed what appeared or changed; stock Megatron-Core and "
        "stock DCP loaded every checkpoint bit for bit, into the same and into other layouts, without robust_dcp."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
