"""Turns a checkpoint, or a file of `torch.save`, into another form."""

from robust_dcp.conversion.convert import ConversionReport, convert
from robust_dcp.conversion.rules import Rules

__all__ = ["ConversionReport", "Rules", "convert"]
