"""Contradictions between ranks: one name that means different things.

Pure checks over :class:`GlobalColumns`; each finding is a :class:`PlanConflict` that names the key, the ranks and
what each of them holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import PlanConflict
from robust_dcp.plan.global_plan.columns import GlobalColumns
from robust_dcp.plan.structure import ItemKind
from robust_dcp.plan.structure.table import Path

__all__ = ["ranks_in_words", "refuse_contradictions", "refuse_other_paths"]

_SHOWN = 8
"""Variants of one name that a message spells out."""


def refuse_contradictions(columns: GlobalColumns) -> None:
    """Every item of one name must agree on being a tensor or not, on dtype, layout and global size.

    Raises:
        PlanConflict: for the first name where they do not.
    """
    order = np.argsort(columns.name, kind="stable")
    names = columns.name[order]
    starts = np.flatnonzero(np.diff(names, prepend=-1))
    first = order[starts[np.cumsum(np.diff(names, prepend=-1) != 0) - 1]] if len(order) else order
    is_bytes = columns.kind == ItemKind.BYTES
    for differs, what in (
        (is_bytes[order] != is_bytes[first], "a tensor on some ranks and an object on others"),
        (columns.dtype[order] != columns.dtype[first], "of different dtypes"),
        (columns.layout[order] != columns.layout[first], "of different layouts"),
        (columns.ndim[order] != columns.ndim[first], "of different numbers of dimensions"),
        ((columns.shape[order] != columns.shape[first]).any(axis=1), "of different global sizes"),
    ):
        if differs.any():
            name = int(names[np.flatnonzero(differs)[0]])
            raise _contradiction(columns, np.flatnonzero(columns.name == name), columns.names[name], what)


def _contradiction(columns: GlobalColumns, rows: npt.NDArray[np.intp], key: str, what: str) -> PlanConflict:
    holders: dict[str, list[int]] = defaultdict(list)
    for row in rows.tolist():
        rank = int(columns.rank[row])
        # Without the chunk, which never contradicts: else one odd rank would hide among a thousand shards.
        holders[columns.tables[rank].describe_whole(int(columns.item[row]))].append(rank)
    held = "; ".join(f"{whole} on {ranks_in_words(ranks)}" for whole, ranks in list(holders.items())[:_SHOWN])
    if len(holders) > _SHOWN:
        held += f" and {len(holders) - _SHOWN} more"
    return PlanConflict(
        f"key {key!r} is {what}: {held}. A name must mean the same tensor on every rank of the group: give them "
        "different names, or pass a sharded tensor (DTensor, ShardedTensor)",
        key=key,
        ranks=sorted({int(rank) for rank in columns.rank[rows]}),
    )


def refuse_other_paths(columns: GlobalColumns) -> Mapping[str, Path] | None:
    """The place of each name in the nested state dict (DCP's ``planner_data``); ``None`` if nothing was flattened.

    Raises:
        PlanConflict: where two ranks reach one name by different paths (``{"a": {"b": …}}`` and ``{"a.b": …}``).
    """
    found: dict[str, tuple[Path | None, int]] = {}
    for rank, table in enumerate(columns.tables):
        for name, path in zip(table.names, table.paths, strict=True):
            known, known_rank = found.setdefault(name, (path, rank))
            if known != path:
                raise PlanConflict(
                    f"key {name!r} lies at {known!r} in the state dict of rank {known_rank} and at {path!r} in that "
                    f"of rank {rank}; flattened by dots both have one name: rename one of them",
                    key=name,
                    ranks=[known_rank, rank],
                )
    paths = {name: path for name, (path, _) in sorted(found.items()) if path is not None}
    return paths or None


def ranks_in_words(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"ranks 0-2, 5"``."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    words = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'s' if len(spans) > 1 or spans[0][0] != spans[0][1] else ''} {words}"
