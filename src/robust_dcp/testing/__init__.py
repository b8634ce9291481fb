"""Tools to test programs and plugins that save checkpoints: ranks, faults, disks, damage, and many state dicts.

:mod:`robust_dcp.testing.conformance` has suites to test a storage or planner of your own. They need pytest. The rest
needs only robust_dcp.
"""

from robust_dcp.testing.damage import cut_short, data_files, flip_bit
from robust_dcp.testing.disks import FullDisk, GatedDisk, SlowDisk
from robust_dcp.testing.faults import delay_in, fail_in, kill_in
from robust_dcp.testing.file_calls import FileCalls
from robust_dcp.testing.fingerprints import differences
from robust_dcp.testing.nodes import become_node, can_become_node
from robust_dcp.testing.ranks import Outcome, RankError, RanksOverran, errors, preload, run_ranks, values
from robust_dcp.testing.state_dicts import KINDS

__all__ = [
    "KINDS",
    "FileCalls",
    "FullDisk",
    "GatedDisk",
    "Outcome",
    "RankError",
    "RanksOverran",
    "SlowDisk",
    "become_node",
    "can_become_node",
    "cut_short",
    "data_files",
    "delay_in",
    "differences",
    "errors",
    "fail_in",
    "flip_bit",
    "kill_in",
    "preload",
    "run_ranks",
    "values",
]
