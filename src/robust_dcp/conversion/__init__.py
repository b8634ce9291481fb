"""Turns a checkpoint, or a file of `torch.save`, into another form."""

from robust_dcp.conversion.convert import ConversionReport, Rules, convert

__all__ = ["ConversionReport", "Rules", "convert"]
