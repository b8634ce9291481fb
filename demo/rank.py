"""The program that torchrun starts on every rank: ``rank.py <job module> <working directory>``.

It imports nothing at the top. Stock Megatron's writer spawns a manager process for each rank, which imports this file
again.
"""

from __future__ import annotations


def main() -> None:
    """Join the default group on gloo and call the job's ``main(work)``. In a job that loads, robust_dcp is missing."""
    import importlib
    import logging
    import os
    import sys
    import warnings
    from pathlib import Path

    _, job, work = sys.argv
    is_loading = job.endswith("_load")
    if is_loading:
        sys.modules["robust_dcp"] = None  # type: ignore[assignment]  # an import of it anywhere below fails
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    importlib.import_module(job).main(Path(work))
    dist.destroy_process_group()
    if is_loading:
        # A job of stock torch: at the end of Python a thread of gloo has now and then aborted such a process.
        os._exit(0)


if __name__ == "__main__":
    main()
