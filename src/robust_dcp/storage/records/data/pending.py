"""A value that has a class already, but no contents yet.

Arrays, dtypes and UUIDs are pickled in two steps: they are made empty, then filled. We make them once, when everything
is known. The builders make a ``Pending``, and the machine completes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from robust_dcp.storage.records.data.limits import Budget

__all__ = ["Pending"]


@dataclass(eq=False)
class Pending:
    """Takes the place of a value on the stack until its state comes.

    Attributes:
        complete: makes the value from the state.
        places: where in the memo this object is, so that the value can replace it there.
    """

    complete: Callable[[Any, Budget], Any]
    places: list[int] = field(default_factory=list)
