"""The writer with Megatron's options, and the log line of a save.

Saves of all formats in this package call it.
"""

from __future__ import annotations

import logging
import os

from robust_dcp.megatron.hooks.options import MegatronOptions
from robust_dcp.report import SaveReport
from robust_dcp.storage import RobustWriter

__all__ = ["log_report", "writer_for"]

logger = logging.getLogger(__name__)


def writer_for(path: str | os.PathLike[str], options: MegatronOptions) -> RobustWriter:
    """The writer of one checkpoint.

    Raises:
        ValueError: ``path`` is a URL, such as those of NVIDIA's Multi-Storage Client.
    """
    return RobustWriter(
        path, layout=options.layout, threads=options.writer_threads, buffer_bytes=options.writer_buffer_bytes
    )


def log_report(report: SaveReport) -> None:
    """Log one line on rank 0: bytes, seconds, and whether the plan was reused."""
    if report.rank == 0:
        logger.info("%s", str(report).partition("\n")[0])
