"""The device that these tests run on, and state dicts of other tests moved there.

On a machine without a CUDA device the CPU stands in for it: what can run there does, so that all of it works at the
first try on a machine that has one (``make gpu``). A result of the stand-in says nothing about a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import robust_dcp

__all__ = ["DEVICE", "needs_cuda", "on_device", "save", "synchronize"]

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: make gpu")


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def on_device(value: Any) -> Any:
    """``value`` with all of its tensors on the device; a DTensor on a mesh of devices."""
    if isinstance(value, DTensor):
        # The copy comes first: a mesh gives a rank that has used no device yet the one of its number.
        local = value.to_local().detach().to(DEVICE)
        return DTensor.from_local(
            local,
            _mesh_of_devices(value.device_mesh),
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().to(DEVICE), requires_grad=value.requires_grad)
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if isinstance(value, dict):
        return type(value)((key, on_device(each)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(on_device, value))
    return value


@functools.cache
def _mesh_of_devices(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks. It is made once: each mesh makes groups, which takes longer the more a process has."""
    return DeviceMesh(DEVICE.type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def save(state_dict: dict[str, Any], path: Any, how: str) -> Any:
    """Save by ``save``, or by an async save that stages ``full`` or ``lazy``; the report."""
    if how == "save":
        return robust_dcp.save(state_dict, checkpoint_id=path)
    return robust_dcp.async_save(state_dict, checkpoint_id=path, staging=how).result(timeout=120)  # type: ignore[arg-type]
