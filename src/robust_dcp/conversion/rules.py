"""Which items go into a conversion, and under which names and dtypes.

    Rules(select=("model.*",), rename=(("model.*", "*"),)).names(["model.w", "optimizer.m"])

gives ``{"w": "model.w"}``.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

__all__ = ["Rules"]


@dataclass(frozen=True)
class Rules:
    """What becomes of items.

    Attributes:
        select: globs; an item goes in if one of them fits its name. Empty for all items.
        exclude: globs; an item that one of them fits stays out.
        rename: pairs of globs. The first pair whose left side fits a name gives its new name: what each ``*`` of the
            left side stood for is put where the ``*`` of the right side stand, in order.
        dtypes: pairs of a glob and the name of a dtype, for floating tensors with such a new name. The last one that
            fits counts.
    """

    select: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    dtypes: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for left, right in self.rename:
            if left.count("*") < right.count("*"):
                raise ValueError(f"--rename {left}={right}: the right side has more * than the left side")

    def names(self, names: Iterable[str]) -> dict[str, str]:
        """The old names by the new ones, in the order of ``names``.

        Raises:
            ValueError: two items would get one name.
        """
        found: dict[str, str] = {}
        for name in names:
            if not self._is_wanted(name):
                continue
            new = self.renamed(name)
            if new in found:
                raise ValueError(f"{found[new]!r} and {name!r} would both be called {new!r}; change --rename")
            found[new] = name
        return found

    def renamed(self, name: str) -> str:
        """The new name of an item."""
        for left, right in self.rename:
            fits = _pattern(left).fullmatch(name)
            if fits is not None:
                groups = iter(fits.groups())
                return "".join(part if part != "*" else next(groups) for part in re.split(r"(\*)", right))
        return name

    def dtype(self, name: str) -> str | None:
        """The name of the dtype that a floating tensor with this new name is cast to; ``None`` for its own."""
        return next((dtype for glob, dtype in reversed(self.dtypes) if fnmatch.fnmatchcase(name, glob)), None)

    def unused(self, names: Mapping[str, str]) -> list[str]:
        """The patterns of renames and dtypes that no item has fitted, which may be mistyped.

        Args:
            names: the old names by the new ones, as :meth:`names` gives them.
        """
        renames = [left for left, _ in self.rename if not any(map(_pattern(left).fullmatch, names.values()))]
        return renames + [glob for glob, _ in self.dtypes if not any(fnmatch.fnmatchcase(name, glob) for name in names)]

    def _is_wanted(self, name: str) -> bool:
        def fits(globs: tuple[str, ...]) -> bool:
            return any(fnmatch.fnmatchcase(name, glob) for glob in globs)

        return (not self.select or fits(self.select)) and not fits(self.exclude)


@cache
def _pattern(glob: str) -> re.Pattern[str]:
    return re.compile(
        "".join("(.*)" if part == "*" else re.escape(part) for part in re.split(r"(\*)", glob)), re.DOTALL
    )
