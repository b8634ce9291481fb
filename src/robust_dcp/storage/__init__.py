"""The bytes of a checkpoint: layouts, records, writer, commit, reader, and the metadata file."""

from robust_dcp.storage.consolidate import consolidate
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.read_options import ReadOptions
from robust_dcp.storage.tuning.tune import tune
from robust_dcp.storage.writer import RobustWriter
from robust_dcp.storage.writing.write_options import WriteOptions

__all__ = ["ReadOptions", "RobustReader", "RobustWriter", "WriteOptions", "consolidate", "tune"]
