"""The demo: ``python demo/run.py``. It saves a Megatron-Core and an FSDP2 model, and proves that stock code loads them.

It runs the jobs one after the other under torchrun, in new processes and a temporary directory, and shows what they
did. It exits with 0 only if every claim holds. All numbers come from the evidence that the jobs leave; missing evidence
is an error and never a pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_RERUN_STATE = "rerun_state_machine_state"
_JOB_SECONDS = 240.0

Evidence = dict[str, Any]
Claim = tuple[str, bool]
"""A sentence, and whether the evidence proves it."""


class JobFailed(RuntimeError):
    """A job exited with a code other than 0, or ran too long. The message has the end of its output."""


def main() -> int:
    """Run everything. Returns the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keep", type=Path, metavar="DIR", help="work in this new directory and leave it there")
    keep: Path | None = arguments.parse_args().keep
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="robust-dcp-demo-") as temporary:
        work = keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=keep is None)
        try:
            claims = [*_megatron(work), *_fsdp(work)]
        except JobFailed as error:
            print(f"\nNOT PROVED: {error}")
            return 1
    return _conclude(claims, time.perf_counter() - begin)


def _megatron(work: Path) -> list[Claim]:
    print("\nMegatron-Core: MoE GPT model, distributed optimizer, 4 ranks on CPU")
    saved = _run("megatron_save", work, ranks=4)
    print(f"  Megatron-Core {saved['megatron']}, {saved['layout']}")
    _show_saves(saved["saves"], "stock, cached_metadata=True")
    loaded = _run("megatron_load", work, ranks=4)
    _show_loads("stock Megatron", loaded["loads"])
    ours, stock = loaded["lost"]["robust"], loaded["lost"]["stock"]
    print(f"  keys missing from the third checkpoint: robust_dcp {ours}")
    print(f"                                          stock      {stock}")
    expected = {(number, saved["layout"]) for number in (1, 2, 3)} | {(3, "TP2 x PP1 x EP2"), (3, "TP1 x PP1 x EP4")}
    return [
        *_about_saves("Megatron", saved["saves"], _RERUN_STATE),
        *_about_loads(f"stock Megatron-Core {saved['megatron']}", loaded, expected, ("rng_state", _RERUN_STATE)),
        ("robust_dcp's third checkpoint has every key", ours == []),
        (
            f"stock Megatron with cached_metadata=True lost {len(stock)} keys at {_RERUN_STATE!r}, and said nothing",
            bool(stock) and all(key.startswith(_RERUN_STATE) for key in stock),
        ),
    ]


def _fsdp(work: Path) -> list[Claim]:
    print("\nFSDP2: fully_shard and AdamW, 4 ranks on CPU")
    saved = _run("fsdp_save", work, ranks=4)
    print(f"  torch {saved['torch']}")
    _show_saves(saved["saves"], "stock, enable_plan_caching=True")
    on_4, on_2 = _run("fsdp_load", work, ranks=4), _run("fsdp_load", work, ranks=2)
    _show_loads("stock DCP", [*on_4["loads"], *on_2["loads"]])
    weights, fourth = on_4["loss_weights"], saved["saves"][3]
    print(f"  loss_weights in the fourth checkpoint: saved {weights['saved']}, through stock's converter:")
    print(f"    from robust_dcp's {weights['robust']}, from stock's {weights['stock']}")
    reader = f"stock DCP of torch {saved['torch']}"
    on_mesh = {(number, "4 ranks") for number in (1, 2, 3, 4)} | {(number, "2 x 2 ranks") for number in (3, 4)}
    return [
        *_about_saves("FSDP2", saved["saves"], "ema"),
        *_about_loads(f"{reader}, 4 ranks", on_4, on_mesh),
        *_about_loads(f"{reader}, 2 ranks", on_2, {(number, "2 ranks") for number in (3, 4)}),
        (
            f"the fourth save noticed that 'loss_weights' changed and made a new plan ({fourth['plan']})",
            fourth["plan"] == "rebuilt" and fourth["changed"] == ["loss_weights"],
        ),
        (f"dcp_to_torch_save reads {weights['robust']} from robust_dcp's", weights["robust"] == weights["saved"]),
        (
            f"dcp_to_torch_save reads {weights['stock']} from stock's with enable_plan_caching=True, saved were "
            f"{weights['saved']}",
            weights["stock"] != weights["saved"],
        ),
    ]


def _run(job: str, work: Path, *, ranks: int) -> Evidence:
    """Run ``demo.<job>.main(work)`` on ``ranks`` fresh processes. Gives its evidence.

    Raises:
        JobFailed: the job failed.
    """
    words = ["--standalone", f"--nproc-per-node={ranks}", "-m", "demo.rank", f"demo.{job}", str(work)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"),
    }
    begin = time.perf_counter()
    log = work / f"{job}_{ranks}.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=_ROOT)
        try:
            ended = f"exited with code {process.wait(_JOB_SECONDS)}"
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its workers
            process.wait()
            ended = f"ran longer than {_JOB_SECONDS:g} s"
    if ended != "exited with code 0":
        end = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
        raise JobFailed(f"{job} {ended}\n{end}")
    seconds = time.perf_counter() - begin
    print(f"\n  $ torchrun --nproc-per-node={ranks} demo/{job}.py    {seconds:.1f} s, starting Python included")
    evidence: Evidence = json.loads((work / f"{job}.json").read_text())
    return evidence


# --- what is shown ----------------------------------------------------------------------------------------------------


def _show_saves(saves: list[Evidence], stock: str) -> None:
    rows = [
        (
            *(str(number), save["plan"], str(save["items"]), f"{save['nbytes'] / 2**20:.1f} MiB"),
            *(f"{save['seconds']:.3f}", f"{save['stock_seconds']:.3f}"),
        )
        for number, save in enumerate(saves, start=1)
    ]
    _print_table(("save", "plan", "items", "written", "seconds", f"seconds ({stock})"), rows)
    for number, save in enumerate(saves, start=1):
        print(f"  save {number}: plan {save['plan']}: {save['reason']}")


def _show_loads(reader: str, loads: list[Evidence]) -> None:
    rows = [
        (
            *(str(load["save"]), load["layout"], str(load["n_keys"]), f"{load['nbytes'] / 2**20:.1f} MiB"),
            "equal" if not load["differing"] else f"DIFFERS: {load['differing'][:3]}",
        )
        for load in loads
    ]
    _print_table(("save", f"loaded by {reader} into", "keys", "compared", "bit for bit"), rows)


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for cells in (header, ["-" * width for width in widths], *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    print("")


# --- what is claimed --------------------------------------------------------------------------------------------------


def _about_saves(what: str, saves: list[Evidence], appeared: str) -> list[Claim]:
    """``appeared`` is a prefix of the keys that are new in the third save."""
    first, second, third = saves[:3]
    is_named = bool(third["added"]) and all(key.startswith(appeared) for key in third["added"])
    return [
        (f"{what}: the first save built a plan", first["plan"] == "built"),
        (f"{what}: the repeated save reused it", second["plan"] == "reused"),
        (
            f"{what}: the third save noticed {appeared!r} and made a new plan ({third['plan']})",
            third["plan"] == "rebuilt" and is_named,
        ),
        (f"{what}: all ranks agreed on each plan", all(save["do_all_ranks_agree"] for save in saves)),
    ]


def _about_loads(
    reader: str, evidence: Evidence, expected: set[tuple[int, str]], layout_bound: tuple[str, ...] = ()
) -> list[Claim]:
    """``reader`` made every expected load (save, layout) without robust_dcp, and every bit was equal. ``layout_bound``
    are prefixes of keys that only the layout of the save asks for."""
    loads = evidence["loads"]
    made = {(load["save"], load["layout"]) for load in loads}
    claims = [
        (f"{reader}: robust_dcp was not imported", evidence["robust_dcp_imported"] is False),
        (f"{reader}: loads {sorted(expected)} were made", made == expected),
    ]
    for load in loads:
        may_skip = layout_bound if load["layout"] != loads[0]["layout"] else ()
        skipped = [key for key in load["not_loaded"] if not (may_skip and key.startswith(may_skip))]
        is_equal = not load["differing"] and not skipped and load["nbytes"] > 0
        problem = "" if is_equal else f"; differing: {load['differing'][:5]}, not loaded: {skipped[:5]}"
        told = f"{reader}: save {load['save']} into {load['layout']}: {load['n_keys']} keys equal{problem}"
        claims.append((told, is_equal))
    return claims


def _conclude(claims: list[Claim], seconds: float) -> int:
    print("\nClaims")
    for sentence, holds in claims:
        print(f"  [{'holds' if holds else 'FAILS'}] {sentence}")
    failed = [sentence for sentence, holds in claims if not holds]
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
