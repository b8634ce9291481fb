"""A value of which a pickle has told the class and not yet the contents.

Arrays, dtypes and UUIDs are pickled in two steps: made empty, then filled. Ours are made once, when all is known. Made
by the builders; the machine completes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from robust_dcp.storage.records.data.limits import Budget

__all__ = ["Pending"]


@dataclass(eq=False)
class Pending:
    """Stands on the stack until its state comes.

    Attributes:
        complete: makes the value out of the state.
        places: where in the memo this stands, and the value is to stand.
    """

    complete: Callable[[Any, Budget], Any]
    places: list[int] = field(default_factory=list)
