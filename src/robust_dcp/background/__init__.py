"""Saves that go on while training does: copies of what they write, and the order in which they are done."""

from robust_dcp.background.save_line import SaveLine, close_lines, line_of
from robust_dcp.background.staged_source import StagedSource

__all__ = ["SaveLine", "StagedSource", "close_lines", "line_of"]
