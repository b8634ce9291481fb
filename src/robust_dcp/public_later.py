"""The public names that no save and no load needs. The package imports them from here when one is first used."""
# ruff: noqa: PLC0414

from robust_dcp.conversion.convert import ConversionReport as ConversionReport
from robust_dcp.conversion.convert import convert as convert
from robust_dcp.manager.manager import CheckpointManager as CheckpointManager
from robust_dcp.manager.series import Checkpoint as Checkpoint
from robust_dcp.manager.series import KeepBest as KeepBest
from robust_dcp.manager.series import KeepEvery as KeepEvery
from robust_dcp.manager.series import KeepLast as KeepLast
from robust_dcp.manager.series import KeepPolicy as KeepPolicy
from robust_dcp.proof import ProofReport as ProofReport
from robust_dcp.proof import prove as prove
