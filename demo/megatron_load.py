"""A job in new processes without robust_dcp: stock Megatron-Core loads the checkpoints, into other layouts too."""

from __future__ import annotations

import sys

sys.modules["robust_dcp"] = None  # type: ignore[assignment]  # an import of it anywhere below fails

from demo import megatron_cpu  # noqa: E402

megatron_cpu.install()

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from megatron.core import dist_checkpointing  # noqa: E402
from torch.distributed.checkpoint import FileSystemReader  # noqa: E402

from demo.evidence import write_evidence  # noqa: E402
from demo.megatron_model import SAVED_LAYOUT, Layout, Trainer  # noqa: E402
from demo.megatron_truth import compare  # noqa: E402
from demo.truth import Comparison, Truth, read_truth  # noqa: E402

__all__ = ["main"]

_RESHARDED = (Layout(tensor=2, expert=2), Layout(expert=4))


def main(work: Path) -> None:
    """Load all three checkpoints into the layout that saved them and the third into others, and compare."""
    loads = []
    for layout in (SAVED_LAYOUT, *_RESHARDED):
        trainer = Trainer(layout, seed=2)
        for number in (1, 2, 3) if layout == SAVED_LAYOUT else (3,):
            truth = read_truth(work / "megatron_truth" / f"{number}.pt")
            comparison = _load_and_compare(trainer, work / "megatron_robust" / str(number), truth)
            loads.append({"save": number, "layout": str(layout), **comparison.over_all_ranks(truth)})
    truth = read_truth(work / "megatron_truth" / "3.pt")
    lost = {
        who: sorted(truth.keys() - FileSystemReader(work / f"megatron_{who}" / "3").read_metadata().state_dict_metadata)
        for who in ("robust", "stock")
    }
    evidence = {
        "loads": loads,
        "lost": lost,
        "robust_dcp_imported": any(name.startswith("robust_dcp.") for name in sys.modules),
    }
    write_evidence(work, "megatron_load", evidence)


def _load_and_compare(trainer: Trainer, checkpoint: Path, truth: Truth) -> Comparison:
    """Load, and compare the weights that the model then has, and the optimizer's state that Megatron returned.

    The optimizer does not load its state. Without Transformer Engine or Apex, ``DistributedOptimizer.load_state_dict``
    of 0.16 asks a ``fully_reshardable`` checkpoint for the ``step`` of torch's Adam, which no save writes.
    """

    def template() -> dict[str, Any]:
        state_dict = trainer.sharded_state_dict(is_loading=True)
        if (
            trainer.layout == SAVED_LAYOUT
        ):  # these objects belong to the ranks of one layout, and Megatron skips them in another
            state_dict["rng_state"] = trainer.rng_state()
            if any(key.startswith("rerun_state_machine") for key in truth):
                state_dict["rerun_state_machine"] = trainer.rerun_state()
        return state_dict

    loaded = dist_checkpointing.load(template(), str(checkpoint))
    trainer.model.load_state_dict(loaded.pop("model"))
    return compare(template(), loaded, truth)
