"""Versions of packages, and what robust_dcp would take over in this environment."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Final

from robust_dcp.cli.doctoring.finding import Finding, ok, problem, warning
from robust_dcp.environment import VARIABLES, value_of
from robust_dcp.version import __version__

__all__ = ["environment_findings"]

_FRAMEWORKS: Final = ("megatron-core", "torchtitan", "lightning", "accelerate", "transformers", "torchtune", "verl")
_LEAST_TORCH: Final = (2, 7)
_ON: Final = "1"


def environment_findings() -> Iterator[Finding]:
    """Looks at package metadata and environment variables. Imports none of the packages."""
    yield ok("python", platform.python_version())
    yield ok("robust_dcp", __version__)
    yield _torch()
    for name in ("numpy", "msgspec", "isal"):
        version = _version(name)
        if version is None:
            yield problem(name, "is not installed", "install robust-dcp with pip, which brings it along")
        else:
            yield ok(name, version)
    for name in _FRAMEWORKS:
        version = _version(name)
        if version is not None:
            yield ok(name, version)
    yield _taken_over()
    for variable in sorted(os.environ):
        if variable.startswith("ROBUST_DCP_") and variable not in VARIABLES:
            yield warning(
                variable, "no such option", "look for its right name in docs/clusters.md and docs/megatron.md"
            )
    for variable in VARIABLES:
        try:
            value = value_of(variable)
        except ValueError as error:
            yield problem(variable, str(error), "set it to that, or unset it: a process that imports torch ends")
            continue
        if variable == "ROBUST_DCP_TRUSTED" and value:
            what = "loads run whatever code a checkpoint names"
            yield warning(variable, what, "unset it, unless you trust the files")


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return problem("torch", "is not installed", "install PyTorch 2.7 or newer")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < _LEAST_TORCH:
        return problem("torch", version, "robust_dcp needs PyTorch 2.7 or newer")
    return ok("torch", version)


def _taken_over() -> Finding:
    name = "taken over"
    is_on = None
    with contextlib.suppress(ValueError):  # it is told below
        is_on = value_of("ROBUST_DCP")
    if not is_on:
        return ok(name, "nothing, unless a program calls robust_dcp or passes --ckpt-planner robust_dcp (ROBUST_DCP=1)")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", _ON) != _ON:
        return problem(
            name, "nothing: TORCH_DEVICE_BACKEND_AUTOLOAD is off", "unset it, or call robust_dcp.install() yourself"
        )
    points = [each.value for each in metadata.entry_points(group="torch.backends") if each.name == "robust_dcp"]
    if not points:
        return problem(
            name,
            "nothing: the entry point of group torch.backends is missing",
            "install robust-dcp with pip; a source tree on PYTHONPATH has no entry points",
        )
    return ok(name, "torch.distributed.checkpoint and Megatron's checkpoints, because ROBUST_DCP is set")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
