"""The program that torchrun starts on every rank: ``rank.py <job module> <working directory>``.

It imports nothing at the top. Stock Megatron's writer spawns a manager process for each rank, which imports this file
again.
"""

from __future__ import annotations


def main() -> None:
    """Join the default group on gloo and call the job's ``main(work)``."""
    import importlib
    import logging
    import os
    import sys
    import warnings
    from pathlib import Path

    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    importlib.import_module(sys.argv[1]).main(Path(sys.argv[2]))
    dist.destroy_process_group()
    if "robust_dcp" in sys.modules and sys.modules["robust_dcp"] is None:
        # A job of stock torch: at the end of Python a thread of gloo has now and then aborted such a process.
        os._exit(0)


if __name__ == "__main__":
    main()
