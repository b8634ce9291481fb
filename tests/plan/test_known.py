"""A structure is taken from an earlier save only if nothing at all has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from robust_dcp import PlanConflict, RobustCheckpointError, RobustPlanner
from robust_dcp.comm import Channel
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.state_dict.known import KnownStructures
from robust_dcp.plan.structure import Form, ItemKind, ItemStructure, StructureSignature, sorted_places, table_of

StateDict = dict[str, Any]


def _describe(state_dict: StateDict, **options: Any) -> LocalStructure:
    planner = RobustPlanner(**options)
    planner.set_up_planner(state_dict, is_coordinator=True)
    channel = Channel.for_group(None, timeout_seconds=10, no_dist=True)
    return planner.describe(channel)


def _state_dict() -> StateDict:
    return {
        "model": {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(()), "deep": {"d": torch.zeros(1)}},
        "step": 7,
        "list": [torch.zeros(2), 1],
    }


def _changed(change: Callable[[StateDict], Any]) -> StateDict:
    state_dict = _state_dict()
    change(state_dict)
    return state_dict


_CHANGES: dict[str, Callable[[StateDict], Any]] = {
    "dtype": lambda s: s["model"].update(b=torch.zeros(4, dtype=torch.float16)),
    "shape": lambda s: s["model"].update(b=torch.zeros(5)),
    "dimensions": lambda s: s["model"].update(b=torch.zeros(2, 2)),
    "requires_grad": lambda s: s["model"].update(b=torch.zeros(4, requires_grad=True)),
    "layout": lambda s: s["model"].update(b=torch.zeros(4).to_sparse()),
    "form": lambda s: s["model"].update(b=torch.zeros(4, device="meta")),
    "tensor to object": lambda s: s["model"].update(b="text"),
    "object to tensor": lambda s: s.update(step=torch.zeros(())),
    "added": lambda s: s["model"].update(e=torch.zeros(1)),
    "removed": lambda s: s["model"].pop("b"),
    "renamed": lambda s: s["model"].update(z=s["model"].pop("b")),
    "two swapped": lambda s: s["model"].update(a=s["model"]["b"], b=s["model"]["a"]),
    "path": lambda s: s.update({"model": {k: v for k, v in s["model"].items() if k != "b"}, "model.b": torch.zeros(4)}),
    "deeper path": lambda s: s["model"].update({"deep.d": s["model"].pop("deep")["d"]}),
    "index to key": lambda s: s.update(list={"0": torch.zeros(2), "1": 1}),
    "list to object": lambda s: s.update(list=[2, 1]),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_a_change_of_one_item_is_noticed(change: Callable[[StateDict], Any]) -> None:
    before = _describe(_state_dict())
    after = _describe(_changed(change))
    assert after.signature != before.signature
    assert after.signature == StructureSignature.of(after.table, after.context)
    assert _describe(_state_dict()).signature == before.signature


def test_an_equal_state_dict_takes_table_and_signature_as_they_are() -> None:
    first = _describe(_state_dict())
    again = _describe({**_state_dict(), "step": "other contents"})
    assert again.table is first.table and again.signature is first.signature


def test_two_models_that_alternate_are_both_known() -> None:
    model, ema = _describe(_state_dict()), _describe({"ema": _state_dict()})
    for _ in range(3):
        assert _describe(_state_dict()).table is model.table
        assert _describe({"ema": _state_dict()}).table is ema.table


def test_the_order_of_keys_makes_no_other_signature() -> None:
    def backwards(value: Any) -> Any:
        return {key: backwards(value[key]) for key in reversed(value)} if isinstance(value, dict) else value

    one, other = _describe(_state_dict()), _describe(backwards(_state_dict()))
    assert one.signature == other.signature


@pytest.mark.parametrize(
    "options",
    [{"dedup_save_to_lowest_rank": True}, {"on_replica_mismatch": "error"}, {"flatten_sharded_tensors": False}],
    ids=str,
)
def test_the_same_items_in_another_context_have_another_signature(options: dict[str, Any]) -> None:
    one, other = _describe(_state_dict()), _describe(_state_dict(), **options)
    assert other.table is one.table and other.signature != one.signature


def test_a_flat_state_dict_is_no_nested_one() -> None:
    flat = {"a": torch.zeros(1), "b": torch.zeros(2)}
    one = _describe(flat)
    other = _describe(flat, flatten_state_dict=False, flatten_sharded_tensors=False)
    assert one.table.paths is not None and other.table.paths is None
    assert one.signature != other.signature


_OBJECT = ItemStructure(ItemKind.BYTES, Form.VARIABLE)


def _tensor(size: int) -> ItemStructure:
    return ItemStructure(ItemKind.TENSOR, Form.FIXED, "float32", "strided", False, (size,), (0,), (size,))


def test_what_is_known_is_what_would_be_made_anew() -> None:
    names, structures = ["c", "a", "b"], [_tensor(3), _OBJECT, _tensor(1)]
    known = KnownStructures().of(names, structures, {"a": ("a",), "b": ("b",), "c": ("c",)})
    order = sorted_places(names, structures)
    made = table_of([names[place] for place in order], [structures[place] for place in order], {n: (n,) for n in names})
    assert known.order.tolist() == order == [1, 2, 0]
    assert known.expected == [None, (torch.float32, torch.Size([1])), (torch.float32, torch.Size([3]))]
    assert known.table.names == made.names
    assert all((a == b).all() for a, b in zip(known.table.columns, made.columns, strict=True))


def test_only_the_last_few_are_kept() -> None:
    first = KnownStructures().of(["a"], [_OBJECT], None)
    structures = KnownStructures(max_nbytes=2 * first.nbytes)
    first, second, third = (structures.of([name], [_OBJECT], None) for name in "abc")
    assert structures.of(["b"], [_OBJECT], None) is second
    assert structures.of(["c"], [_OBJECT], None) is third
    assert structures.of(["a"], [_OBJECT], None) is not first
    assert structures.of(["c"], [_OBJECT], None) is third
    assert structures.of(["b"], [_OBJECT], None) is not second


def test_a_name_that_stands_for_two_items_is_refused_every_time() -> None:
    structures = KnownStructures()
    for _ in range(2):
        with pytest.raises(PlanConflict, match="names 'a' twice"):
            structures.of(["a", "a"], [_OBJECT, _OBJECT], None)


def test_an_item_without_a_path_is_named() -> None:
    with pytest.raises(RobustCheckpointError, match="no path for 'b'"):
        KnownStructures().of(["a", "b"], [_OBJECT, _OBJECT], {"a": ("a",)})
