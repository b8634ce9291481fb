"""A job in new processes without robust_dcp: stock Megatron-Core loads the checkpoints, into other layouts too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import FileSystemReader

from demo import megatron_cpu
from demo.evidence import write_evidence
from demo.megatron_model import SAVED_LAYOUT, Layout, Trainer
from demo.megatron_truth import compare
from demo.truth import Comparison, Truth, read_truth

_RESHARDED = (Layout(tensor=2, expert=2), Layout(expert=4))


def main(work: Path) -> None:
    """Load all three checkpoints into the layout that saved them and the third into others, and compare."""
    megatron_cpu.install()
    loads = []
    for layout in (SAVED_LAYOUT, *_RESHARDED):
        trainer = Trainer(layout, seed=2)
        for number in (1, 2, 3) if layout == SAVED_LAYOUT else (3,):
            truth = read_truth(work / "megatron_truth" / f"{number}.pt")
            comparison = _load_and_compare(trainer, work / "megatron_robust" / str(number), truth)
            loads.append({"save": number, "layout": str(layout), **comparison.over_all_ranks()})
    keys = read_truth(work / "megatron_truth" / "3.pt").keys()
    lost = {
        who: sorted(keys - FileSystemReader(work / f"megatron_{who}" / "3").read_metadata().state_dict_metadata)
        for who in ("robust", "stock")
    }
    write_evidence(work, "megatron_load", {"loads": loads, "lost": lost})


def _load_and_compare(trainer: Trainer, checkpoint: Path, truth: Truth) -> Comparison:
    """Load, and compare the weights that the model then has, and the optimizer's state that Megatron returned.

    The optimizer does not load its state. Without Transformer Engine or Apex, ``DistributedOptimizer.load_state_dict``
    of 0.16 asks a ``fully_reshardable`` checkpoint for the ``step`` of torch's Adam, which no save writes.
    """

    def template() -> dict[str, Any]:
        state_dict = trainer.sharded_state_dict(is_loading=True)
        if trainer.layout == SAVED_LAYOUT:  # objects of the ranks of one layout; in another Megatron skips them
            state_dict["rng_state"] = trainer.rng_state()
            if any(key.startswith("rerun_state_machine") for key in truth):
                state_dict["rerun_state_machine"] = trainer.rerun_state()
        return state_dict

    loaded = dist_checkpointing.load(template(), str(checkpoint))
    trainer.model.load_state_dict(loaded.pop("model"))
    return compare(template(), loaded, truth)
