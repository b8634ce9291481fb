"""Copies of checkpoints in durable storage: by a call, or in the background of the job that saves."""

from robust_dcp.drain.copy import CopyResult, copy_checkpoint
from robust_dcp.storage.remote.copy_options import CopyOptions

__all__ = ["CopyOptions", "CopyResult", "copy_checkpoint"]
