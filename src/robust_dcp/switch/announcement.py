"""Writes the line that says what robust_dcp takes over, once a job, to wherever the job's log goes.

Called by ``installation`` and ``megatron.installation``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys

import torch.distributed as dist

__all__ = ["announce"]


def announce(logger: logging.Logger, line: str) -> None:
    """Write the line on rank 0: to the log, or to standard error if the program has not set up its log yet.

    The user of a job should not have to guess what code wrote its checkpoints.
    """
    if not _is_rank_0():
        return
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info("%s", line)
    else:
        sys.stderr.write(f"{line}\n")


def _is_rank_0() -> bool:
    if multiprocessing.parent_process() is not None:
        return False  # a worker process of a rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
