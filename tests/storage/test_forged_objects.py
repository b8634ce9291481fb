"""A forged object is refused with a reason: calls with other arguments, classes with code, tensors beyond storages."""

from __future__ import annotations

import operator
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import _utils as torch_utils

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.metadata.metadata_file import decode_metadata
from tests.storage import forged
from tests.storage.forged import MALFORMED, MALFORMED_CLASSES, NO_DATA, NO_DATA_CLASSES, TENSORS, Call
from tests.storage.test_objects import check, load, saved

REFUSED: dict[str, tuple[Any, Any, str]] = {
    **{name: (value, CorruptCheckpoint, "extra") for name, value in MALFORMED.items()},
    **{name: (value, UnsafeCheckpoint, "extra") for name, value in NO_DATA.items()},
    **{name: (value, CorruptCheckpoint, words) for name, (value, words) in MALFORMED_CLASSES.items()},
    **{name: (value, UnsafeCheckpoint, words) for name, (value, words) in NO_DATA_CLASSES.items()},
    **{name: (value, (CorruptCheckpoint, UnsafeCheckpoint), words) for name, (value, words) in TENSORS.items()},
}


@pytest.mark.parametrize(("value", "error", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_no_writer_makes_is_refused_and_says_why(value: Any, error: Any, words: str) -> None:
    data = saved({"deep": [value]})
    with pytest.raises(error, match=words):
        load(data)
    if error is UnsafeCheckpoint:
        with pytest.raises(UnsafeCheckpoint, match=words):
            check(data)


def test_a_member_is_found_by_its_name_as_newer_pythons_pickle_it() -> None:
    assert load(saved(Call(getattr, forged.Schedule, "STEP"))) is forged.Schedule.STEP
    flags = Call(operator.or_, forged.Kept.WEIGHTS, forged.Kept.RNG)
    assert load(saved(flags)) == forged.Kept.WEIGHTS | forged.Kept.RNG


def test_a_tensor_of_another_device_comes_to_the_cpu() -> None:
    on_xla = (torch.ones(3), torch.float64, "xla:0", True)
    loaded = load(saved(Call(torch_utils._rebuild_device_tensor_from_cpu_tensor, *on_xla)))
    assert loaded.requires_grad and torch.equal(loaded.detach(), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("how", ["its module is not imported here", "it is not a class here"])
def test_a_name_that_the_program_has_not_is_not_looked_for_elsewhere(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(forged.Config(0.1))
    if "imported" in how:
        monkeypatch.delitem(sys.modules, forged.__name__)
    else:
        monkeypatch.setattr(forged, "Config", 3)
    with pytest.raises(UnsafeCheckpoint, match=how):
        load(data)


def test_bytes_never_become_pointers_even_if_numpy_itself_is_registered_as_megatron_does() -> None:
    types = [type(np.dtype("O")), type(np.dtype("f8"))]
    with torch.serialization.safe_globals([forged.RECONSTRUCT, np.ndarray, np.dtype, *types]):
        for value in (forged.array((4,), b"A" * 32, forged.dtype("O8")), forged.made(np.ndarray, (4,), np.object_)):
            with pytest.raises((CorruptCheckpoint, UnsafeCheckpoint)):
                load(saved(value))
            with pytest.raises(UnsafeCheckpoint, match="numpy"):
                decode_metadata(pickle.dumps(value, 2), ".metadata")
