"""Tensors within objects are loaded if torch.save could have written them. Forged ones are refused with a reason."""

from __future__ import annotations

import collections
import io
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import _utils as torch_utils
from torch.storage import TypedStorage

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from tests.storage.test_forged_objects import Call
from tests.storage.test_objects import load as load_bytes
from tests.storage.test_objects import saved

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:.*quantiz"),
    pytest.mark.filterwarnings("ignore:TypedStorage"),
]

NO_HOOKS: collections.OrderedDict[str, Any] = collections.OrderedDict()


def load(value: Any) -> Any:
    return load_bytes(saved(value))


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.partition = {"dim": 1, "name": "columns"}  # type: ignore[attr-defined]
    tensor.sizes = torch.Size([2])  # type: ignore[attr-defined]
    return tensor


def matrix() -> torch.Tensor:
    return torch.tensor([[0.0, 1.5, 0.0, 0.0], [2.0, 0.0, 0.0, 3.0]])


def quantized_by_channel(dtype: torch.dtype, zeros: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_channel(matrix(), torch.tensor([0.1, 0.5]), zeros, 0, dtype)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: matrix().t(),
    "a slice": lambda: matrix()[1:, 1:3],
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3),
    "uint16, whose storage has no type": lambda: torch.tensor([1, 2], dtype=torch.uint16),
    "float8": lambda: matrix().to(torch.float8_e4m3fn),
    "needs a gradient": lambda: matrix().requires_grad_(),
    "conjugated": lambda: torch.tensor([1 + 2j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j]).conj().imag,
    "coordinates": lambda: matrix().to_sparse(),
    "coordinates that are not coalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    "compressed rows": lambda: matrix().to_sparse_csr(),
    "compressed columns": lambda: matrix().to_sparse_csc(),
    "compressed rows of blocks": lambda: matrix().to_sparse_bsr((2, 2)),
    "compressed columns of blocks": lambda: matrix().to_sparse_bsc((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(matrix(), 0.5, 3, torch.qint8),
    "quantized by channel": lambda: quantized_by_channel(torch.qint8, torch.tensor([1, 2])),
    "quantized by channel, zeros between numbers": lambda: quantized_by_channel(torch.quint8, torch.tensor([0.5, 1.5])),
    "meta": lambda: torch.empty(1 << 40, 3, device="meta"),
    "parameter": lambda: torch.nn.Parameter(matrix(), requires_grad=False),
    "parameter with attributes": lambda: with_attribute(torch.nn.Parameter(matrix())),
    "tensor with attributes": lambda: with_attribute(matrix()),
}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_meta:
        return other.is_meta
    if one.is_quantized:
        return torch.equal(one.int_repr(), other.int_repr()) and torch.equal(one.dequantize(), other.dequantize())
    if one.layout is not torch.strided:
        return torch.equal(one.to_dense(), other.to_dense())
    if one.dtype.itemsize == 1:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_a_tensor_is_loaded_as_it_was_saved(make: Callable[[], torch.Tensor]) -> None:
    value = make()
    loaded = load_bytes(saved(value))
    assert type(loaded) is type(value)
    assert (loaded.dtype, loaded.shape, loaded.layout, loaded.requires_grad, loaded.__dict__) == (
        value.dtype,
        value.shape,
        value.layout,
        value.requires_grad,
        value.__dict__,
    )
    if value.layout is torch.strided:
        assert (loaded.stride(), loaded.is_conj(), loaded.is_neg()) == (value.stride(), value.is_conj(), value.is_neg())
    assert same(value, loaded)


@pytest.mark.parametrize(
    "value",
    [torch.device("cuda", 3), torch.device("cpu"), torch.sparse_csr, torch.per_channel_affine],
    ids=str,
)
def test_constants_of_torch_are_data(value: Any) -> None:
    assert load({"constant": value}) == {"constant": value}


def storage(numbers: int = 4) -> TypedStorage:
    return TypedStorage(wrap_storage=torch.zeros(numbers).untyped_storage(), dtype=torch.float32, _internal=True)


def tensor_v2(*place: Any, requires_grad: Any = False, hooks: Any = NO_HOOKS, flags: tuple[Any, ...] = ()) -> Call:
    return Call(torch_utils._rebuild_tensor_v2, *place, requires_grad, hooks, *flags)


def sparse(layout: Any, *parts: Any) -> Call:
    return Call(torch_utils._rebuild_sparse_tensor, layout, parts)


def quantized(quantizer: Any, size: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,)) -> Call:
    return Call(torch_utils._rebuild_qtensor, storage(), 0, size, stride, quantizer, False, NO_HOOKS)


def with_state(state: Any, kind: type = torch.Tensor) -> Call:
    return Call(torch._tensor._rebuild_from_type_v2, torch_utils._rebuild_tensor_v2, kind, _PLACE, state)


_PLACE = (storage(), 0, (4,), (1,), False, NO_HOOKS)

FORGED: dict[str, tuple[Call, str]] = {
    "larger than its storage": (tensor_v2(storage(), 0, (5,), (1,)), "needs 20 bytes"),
    "beyond its storage": (tensor_v2(storage(), 3, (2,), (1,)), "needs 20 bytes"),
    "strides beyond its storage": (tensor_v2(storage(), 0, (2, 2), (3, 1)), "needs 20 bytes"),
    "endless": (tensor_v2(storage(), 0, (1 << 40, 1 << 40), (0, 0)), "needs"),
    "negative size": (tensor_v2(storage(), 0, (-1,), (1,)), "not integers of 0 or more"),
    "negative offset": (tensor_v2(storage(), -1, (1,), (1,)), "not integers of 0 or more"),
    "strides of another number": (tensor_v2(storage(), 0, (1, 1), (1,)), "number of strides"),
    "no storage": (tensor_v2("text", 0, (1,), (1,)), "no storage"),
    "with hooks": (tensor_v2(storage(), 0, (1,), (1,), hooks={"hook": 1}), "other arguments"),
    "other flags": (tensor_v2(storage(), 0, (1,), (1,), flags=({"zero": True},)), "flags"),
    "third form, no dtype": (
        Call(torch_utils._rebuild_tensor_v3, storage(), 0, (1,), (1,), False, NO_HOOKS, "float"),
        "other arguments",
    ),
    "third form, larger type": (
        Call(torch_utils._rebuild_tensor_v3, storage(), 0, (4,), (1,), False, NO_HOOKS, torch.complex128),
        "needs 64 bytes",
    ),
    "quantized, no scheme": (quantized(()), "quantized tensor from other arguments"),
    "quantized, numbers missing": (quantized((torch.per_tensor_affine, 0.5)), "a quantizer"),
    "quantized, unknown scheme": (quantized((torch.per_channel_symmetric, 0.5, 3)), "scheme that is not known"),
    "quantized, larger than its storage": (
        quantized((torch.per_tensor_affine, 0.5, 3), size=(1 << 20,), stride=(0,)),
        "larger than its storage",
    ),
    "quantized, scales of another size": (
        quantized((torch.per_channel_affine, torch.ones(3), torch.zeros(3), 0)),
        "scales",
    ),
    "sparse, parts missing": (sparse(torch.sparse_coo, torch.zeros(1, 1)), "sparse tensor from other arguments"),
    "sparse, no values": (sparse(torch.sparse_coo, torch.zeros(1, 1), "text", (3,)), "no indices, values or size"),
    "sparse, unknown layout": (
        sparse(torch.strided, torch.zeros(1), torch.zeros(1), torch.zeros(1), (3,)),
        "layout that is not known",
    ),
    "meta, negative": (
        Call(torch_utils._rebuild_meta_tensor_no_storage, torch.float32, (-1,), (1,), False),
        "without data",
    ),
    "parameter of a text": (Call(torch_utils._rebuild_parameter, "text", True, NO_HOOKS), "a parameter"),
    "parameter with state, too few": (Call(torch_utils._rebuild_parameter_with_state, torch.zeros(1)), "a parameter"),
    "of a device, no dtype": (
        Call(torch_utils._rebuild_device_tensor_from_cpu_tensor, torch.zeros(1), "float", "cpu", False),
        "on a device",
    ),
    "attributes that are no dict": (with_state([1, 2]), "not a dict"),
    "a method as attribute": (with_state({"numpy": 1}), "must not set"),
    "an attribute that is a tensor": (with_state({"other": torch.zeros(1)}), "not a plain value"),
    "of another class than it has": (with_state({}, torch.nn.Parameter), "another class"),
    "a layout that is none": (Call(torch.serialization._get_layout, "torch.ones"), "is not a layout"),
    "a size of texts": (Call(torch.Size, ["text"]), "torch.Size"),
}


@pytest.mark.parametrize(("call", "why"), FORGED.values(), ids=FORGED.keys())
def test_a_forged_tensor_is_refused(call: Call, why: str) -> None:
    with pytest.raises((CorruptCheckpoint, UnsafeCheckpoint), match=why):
        load({"deep": [call]})


@pytest.mark.parametrize(
    "forged",
    [
        sparse(torch.sparse_coo, torch.tensor([[7]]), torch.ones(1), (3,)),
        sparse(torch.sparse_csr, torch.tensor([0, 1]), torch.tensor([7]), torch.ones(1), (1, 3)),
        sparse(torch.sparse_csr, torch.tensor([0, 9]), torch.tensor([0]), torch.ones(1), (1, 3)),
    ],
    ids=["coordinates", "columns", "rows"],
)
def test_indices_of_a_sparse_tensor_must_lie_in_it(forged: Call) -> None:
    with pytest.raises(CorruptCheckpoint):
        load_bytes(saved(forged))


def test_a_tensor_of_another_device_comes_to_the_cpu() -> None:
    loaded = load(Call(torch_utils._rebuild_device_tensor_from_cpu_tensor, torch.ones(3), torch.float64, "xla:0", True))
    assert loaded.requires_grad and torch.equal(loaded.detach(), torch.ones(3, dtype=torch.float64))


def test_tensors_that_share_memory_share_it_again() -> None:
    base = torch.zeros(4)
    loaded = load_bytes(saved([base, base[1:3]]))
    loaded[0][2] = 5.0
    assert loaded[1].tolist() == [0.0, 5.0]


def rewritten(data: bytes, **members: bytes | None) -> bytes:
    """The archive with other contents of some members, by the end of their names; ``None`` leaves one out."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            key = name.partition("/")[2]
            content = members.get(key, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return buffer.getvalue()


def test_a_checkpoint_of_a_machine_with_the_other_byte_order_is_read() -> None:
    value = torch.tensor([1.5, -2.0])
    swapped = value.numpy().astype(">f4").tobytes()
    data = rewritten(saved(value), byteorder=b"big", **{"data/0": swapped})
    assert torch.equal(torch.load(io.BytesIO(data)), value)
    assert torch.equal(load_bytes(data), value)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"data/0": None}, "no such storage"),
        ({"data/0": b"1234"}, "one of 4 bytes"),
        ({"data.pkl": None}, "no data.pkl"),
    ],
    ids=["a storage is missing", "a storage is shorter", "the pickle is missing"],
)
def test_an_archive_without_what_its_pickle_names_is_corrupt(members: dict[str, bytes | None], why: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=why):
        load_bytes(rewritten(saved(torch.ones(4)), **members))
