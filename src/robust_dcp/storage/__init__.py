"""The bytes of a checkpoint: layouts, records, writer, commit, reader, and the metadata file."""

from typing import TYPE_CHECKING

from robust_dcp.on_demand import names_from

if TYPE_CHECKING:
    from robust_dcp.storage.reader import RobustReader
    from robust_dcp.storage.reading.read_options import ReadOptions
    from robust_dcp.storage.tuning import tune
    from robust_dcp.storage.writer import RobustWriter
    from robust_dcp.storage.writing.write_options import WriteOptions

__all__ = ["ReadOptions", "RobustReader", "RobustWriter", "WriteOptions", "tune"]

__getattr__, __dir__ = names_from(
    __name__,
    {
        "robust_dcp.storage.reader": ("RobustReader",),
        "robust_dcp.storage.reading.read_options": ("ReadOptions",),
        "robust_dcp.storage.tuning": ("tune",),
        "robust_dcp.storage.writer": ("RobustWriter",),
        "robust_dcp.storage.writing.write_options": ("WriteOptions",),
    },
)
