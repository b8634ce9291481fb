"""What the forkserver imports once, so that a rank starts in milliseconds with everything at hand.

It never starts a thread or touches a device: a process that did could not be forked. Only the forkserver imports it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import warnings
from collections.abc import Iterable

__all__ = ["load_for_ranks"]

_OFTEN_NEEDED = (
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
    "robust_dcp",
    "robust_dcp.testing.state_dicts",
)


def load_for_ranks(names: Iterable[str]) -> None:
    """Import modules in the forkserver.

    A module that cannot be imported fails in the rank that needs it, with a traceback, and not here, where an exception
    would end the server and be reported as a broken pipe. So do warnings: in the test, or not at all.
    """
    for name in names:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    # A rank that collected garbage would walk all that is loaded here, and copy every page that it touches.
    gc.collect()
    gc.freeze()


load_for_ranks(_OFTEN_NEEDED)
