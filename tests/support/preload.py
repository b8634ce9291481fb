"""What the forkserver imports once, so that a rank starts in milliseconds with everything at hand.

It never starts a thread or touches a device: a process that did could not be forked. Only the forkserver imports it.
"""

from __future__ import annotations

import contextlib
import importlib

THIRD_PARTY = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "numpy",
    "msgspec",
    "pytest",
    "hypothesis",
)
OWN = (
    "robust_dcp",
    "robust_dcp.errors",
    "robust_dcp.comm",
    "robust_dcp.storage",
    "robust_dcp.plan",
    "robust_dcp.planner",
    "robust_dcp.api",
)

for name in (*THIRD_PARTY, *OWN):
    # A module that cannot be imported fails in the rank that needs it, with a traceback, and not here, where an
    # exception would end the server and be reported as a broken pipe.
    with contextlib.suppress(Exception):
        importlib.import_module(name)
