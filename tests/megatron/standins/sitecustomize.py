"""What Megatron-Core 0.19 and Megatron-Bridge 0.6 import without asking and this machine does not have; only ``make
test-compat`` puts this folder on the path, and Python runs it at the start of every process.

``triton`` (its kernels are decorated when their modules are imported; it is of no use without a GPU) and, below Python
3.12, ``typing.override``. PyTorch is not shown the stand-in: it takes one look for triton and does without.

For Megatron-Bridge ``transformer_engine``, which needs CUDA, and ``nvidia_resiliency_ext``, of which this
folder of packages has none. Megatron-Core is not shown them either.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

if not hasattr(typing, "override"):
    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined]


def _decorator(*args: Any, **kwargs: Any) -> Any:
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _decorator


class _Kernels(ModuleType):
    __version__ = "3.4.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorator


class _Triton(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ("triton", "triton.language") or _importing_module().startswith("torch"):
            return None
        # Inductor looks for triton when it is imported, and Megatron's first torch.compile imports it: before.
        import torch._inductor.compile_fx  # noqa: F401

        return ModuleSpec(fullname, self, is_package=fullname == "triton")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _ForBridge(MetaPathFinder, Loader):
    """Two packages, for the modules of Megatron-Bridge that cannot be imported without them, and for no others."""

    attributes: ClassVar[dict[str, dict[str, Any]]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {"TransformerLayer": object, "ops": SimpleNamespace(Sequential=object)},
        "nvidia_resiliency_ext": {},
        "nvidia_resiliency_ext.inprocess": {"CallWrapper": object},
    }
    needed_by = (
        "megatron.bridge.models.gpt_full_te_layer_autocast_spec",
        "megatron.bridge.peft.lora_layers",
        "megatron.bridge.training.pretrain",
    )

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.attributes or _importing_module() not in self.needed_by:
            return None
        return ModuleSpec(fullname, self, is_package="." not in fullname)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module).update(self.attributes[spec.name])
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _importing_module() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("importlib", "robust_dcp")):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


sys.meta_path += [_Triton(), _ForBridge()]
