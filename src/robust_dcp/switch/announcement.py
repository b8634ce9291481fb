"""The line that says what was taken over: once for a job, wherever its log goes.

Owns where it is said. Called by ``installation`` and by Megatron's.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys

import torch.distributed as dist

__all__ = ["announce"]


def announce(logger: logging.Logger, line: str) -> None:
    """Say it on rank 0: to the log, or to standard error before the program has set up its log. A run should not have
    to guess who wrote its checkpoints."""
    if not _is_rank_0():
        return
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info("%s", line)
    else:
        sys.stderr.write(f"{line}\n")


def _is_rank_0() -> bool:
    if multiprocessing.parent_process() is not None:
        return False  # a worker of some rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
