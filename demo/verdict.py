"""The claims that the evidence should prove: one sentence for each, and whether it holds.

All numbers come from the evidence. Missing evidence is an error and never a pass. Called by ``run``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Claim", "about_a_changed_tensor", "about_loads", "about_lost_keys", "about_saves"]

Evidence = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """A sentence, and whether the evidence proves it."""

    sentence: str
    holds: bool


_NEW_PLANS = ("rebuilt",)


def about_saves(what: str, saves: list[Evidence], appeared: str) -> list[Claim]:
    """The first save builds a plan, the second reuses it, and the third plans anew and names ``appeared``, a prefix of
    the new keys."""
    first, second, third = (save["report"] for save in saves[:3])
    named = bool(third["added"]) and all(key.startswith(appeared) for key in third["added"])
    return [
        Claim(f"{what}: the first save built a plan", first["plan"] == "built"),
        Claim(f"{what}: the repeated save reused it", second["plan"] == "reused"),
        Claim(
            f"{what}: the third save noticed {appeared!r} and made a new plan ({third['plan']})",
            third["plan"] in _NEW_PLANS and named,
        ),
        Claim(
            f"{what}: all ranks agreed on each plan",
            all(len({rank["plan"] for rank in save["report"]["ranks"]}) == 1 for save in saves),
        ),
    ]


def about_loads(
    reader: str, evidence: Evidence, expected: set[tuple[int, str]], layout_bound: tuple[str, ...] = ()
) -> list[Claim]:
    """``reader`` made every expected load without robust_dcp, and every bit was equal.

    Args:
        expected: (number of the save, layout) of each load that must have been made.
        layout_bound: prefixes of keys that only the layout of the save asks for.
    """
    loads = evidence["loads"]
    claims = [
        Claim(f"{reader}: robust_dcp was not imported", evidence["robust_dcp_imported"] is False),
        Claim(
            f"{reader}: loads {sorted(expected)} were made",
            {(load["save"], load["layout"]) for load in loads} == expected,
        ),
    ]
    saved_layout = loads[0]["layout"]
    for load in loads:
        may_skip = layout_bound if load["layout"] != saved_layout else ()
        skipped = [key for key in load["not_loaded"] if not key.startswith(may_skip or ("\0",))]
        equal = not load["differing"] and not skipped and load["n_tensors"] > 0
        problem = "" if equal else f"; differing: {load['differing'][:5]}, not loaded: {skipped[:5]}"
        claims.append(
            Claim(f"{reader}: save {load['save']} into {load['layout']}: {load['n_keys']} keys equal{problem}", equal)
        )
    return claims


def about_lost_keys(lost: Evidence, appeared: str) -> list[Claim]:
    """robust_dcp's third checkpoint has all keys. Stock's, with its cache on, lacks exactly the new keys."""
    stock = lost["stock"]
    return [
        Claim("robust_dcp's third checkpoint has every key", lost["robust"] == []),
        Claim(
            f"stock Megatron with cached_metadata=True lost {len(stock)} keys at {appeared!r}, and said nothing",
            bool(stock) and all(key.startswith(appeared) for key in stock),
        ),
    ]


def about_a_changed_tensor(save: Evidence, key: str, found: Evidence) -> list[Claim]:
    """After a tensor became float, robust_dcp's metadata says so. Stock's cached plan does not."""
    report = save["report"]
    return [
        Claim(
            f"the fourth save noticed that {key!r} changed and made a new plan ({report['plan']})",
            report["plan"] in _NEW_PLANS and list(report["changed"]) == [key],
        ),
        Claim(f"dcp_to_torch_save reads {found['robust']} from robust_dcp's", found["robust"] == found["saved"]),
        Claim(
            f"dcp_to_torch_save reads {found['stock']} from stock's with enable_plan_caching=True, saved were "
            f"{found['saved']}",
            found["stock"] != found["saved"],
        ),
    ]
