"""State dicts of modules and optimizers, by the names of parameters.

Owns the names of modules and optimizers in a checkpoint. They are those of ``get_model_state_dict`` and
``get_optimizer_state_dict`` (``torch/distributed/checkpoint/state_dict.py``), so they are the same under DDP, FSDP2,
tensor parallelism and ``torch.compile``. Called by ``stateful``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict as named
from torch.optim import Optimizer

from robust_dcp.errors import RobustCheckpointError

__all__ = ["ModuleStates", "OptimizerStates", "modules_in", "optimizers_in", "with_modules"]

StateDict = dict[str, Any]


def modules_in(value: Any) -> list[nn.Module]:
    """The modules in a value of a state dict. The value is one module, or a list of pipeline stages."""
    return [each for each in _all_of(value, nn.Module) if _has_state_dict_of(each, nn.Module)]


def optimizers_in(value: Any) -> list[Optimizer]:
    """The optimizers in a value of a state dict. The value is one optimizer, or a list of several."""
    return [each for each in _all_of(value, Optimizer) if _has_state_dict_of(each, Optimizer)]


def _all_of(value: Any, kind: type[Any]) -> list[Any]:
    if isinstance(value, kind):
        return [value]
    if (
        isinstance(value, list | tuple)
        and value
        and isinstance(value[0], kind)
        and all(isinstance(each, kind) for each in value)
    ):
        return list(value)
    return []


def _has_state_dict_of(value: Any, kind: type[Any]) -> bool:
    """Whether ``value`` uses the ``state_dict`` of ``kind``. An own ``state_dict`` has its own names, which we keep."""
    return type(value).state_dict is kind.state_dict and "state_dict" not in vars(value)


class ModuleStates:
    """The parameters and buffers of the modules under one key of a state dict.

    Args:
        key: the prefix of their names in the checkpoint.
        modules: one module, or the pipeline stages that this rank holds.
        stored: the names in the checkpoint to load; ``None`` for a save.
    """

    def __init__(self, key: str, modules: list[nn.Module], stored: Container[str] | None = None) -> None:
        self._modules = modules
        self.values: StateDict = {}
        for module in modules:
            self.values.update(named.get_model_state_dict(module))
        self._is_as_held = False
        if stored is None or _any_stored(key, self.values, stored):
            return
        as_held = {name: value for module in modules for name, value in module.state_dict().items()}
        if _any_stored(key, as_held, stored):  # stock's save({"model": DDP(model)}) names a parameter "module.weight"
            self._is_as_held, self.values = True, as_held

    def put_back(self, loaded: StateDict) -> None:
        """Load the state into the modules."""
        for module in self._modules:
            if self._is_as_held:
                module.load_state_dict(loaded)
                continue
            own = loaded
            if len(self._modules) > 1:
                own = {name: loaded[name] for name in named.get_model_state_dict(module)}
            named.set_model_state_dict(module, own)


class OptimizerStates:
    """The states and parameter groups of the optimizers under one key of a state dict.

    An optimizer that has not stepped yet is saved without state. ``get_optimizer_state_dict`` makes it step with a
    learning rate of zero. That state is removed again, or training would go on with a step count of one.

    Args:
        key: the prefix of their names in the checkpoint.
        optimizers: each with the module that has its parameters. Without such a module the state is named by the
            numbers of the parameters, as in ``Optimizer.state_dict``.
        by_parameter: whether the options of parameter groups are named by parameter too. torchtitan does this for
            pipeline stages, because their groups differ between ranks.
        stored: the names in the checkpoint to load; ``None`` for a save.
    """

    def __init__(
        self,
        key: str,
        optimizers: list[tuple[Optimizer, nn.Module | None]],
        *,
        by_parameter: bool = False,
        stored: Container[str] | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._options = named.StateDictOptions(flatten_optimizer_state_dict=by_parameter)
        self._is_as_held = False
        self._is_without_state = False
        self.values: StateDict = {}
        for optimizer, module in optimizers:
            if stored is not None or optimizer.state:
                own = self._named(optimizer, module)
            else:
                own = _without_state(self._named(optimizer, module))
                optimizer.state.clear()
            _merge(self.values, own)
        if stored is not None:
            self._choose_names(key, stored)

    def _named(self, optimizer: Optimizer, module: nn.Module | None) -> StateDict:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with _gradients_put_aside(optimizer, parameters):
            if module is not None:
                return dict(named.get_optimizer_state_dict(module, optimizer, options=self._options))
            named.get_optimizer_state_dict(nn.ParameterList(parameters), optimizer)  # makes the state if there is none
        self._is_as_held = True
        return dict(optimizer.state_dict())

    def _choose_names(self, key: str, stored: Container[str]) -> None:
        """Use the names that the checkpoint has: those of parameters, or numbers, or none if there was no state."""
        if self._has_stored_state(key, self.values, stored):
            return
        as_held = dict(self._optimizers[0][0].state_dict())
        if self._has_stored_state(key, as_held, stored):  # stock saved {"optimizer": optimizer}
            self._is_as_held, self.values = True, as_held
        else:
            self._is_without_state, self.values = True, _without_state(self.values)

    def _has_stored_state(self, key: str, values: StateDict, stored: Container[str]) -> bool:
        return _any_stored(key, (name for name in _leaf_names(values) if name.startswith("state.")), stored)

    def put_back(self, loaded: StateDict) -> None:
        """Load the state into the optimizers."""
        for optimizer, module in self._optimizers:
            if module is None or self._is_as_held:
                optimizer.load_state_dict(loaded)
            else:
                named.set_optimizer_state_dict(module, optimizer, loaded, options=self._options)
            if self._is_without_state:
                optimizer.state.clear()


@contextmanager
def _gradients_put_aside(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Hide the gradients of an optimizer without state. torch makes no state where it finds gradients, so a load after
    ``backward()`` would ask for none, and the state in the checkpoint would be dropped."""
    gradients = [] if optimizer.state else [(each, each.grad) for each in parameters if each.grad is not None]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def with_modules(
    key: str, optimizers: list[Optimizer], modules: list[nn.Module]
) -> list[tuple[Optimizer, nn.Module | None]]:
    """Find for each optimizer the module that has its parameters.

    Raises:
        RobustCheckpointError: there are several optimizers under ``key``, and no module has the parameters of one.
    """
    parameters = [{id(parameter) for parameter in module.parameters()} for module in modules]
    found: list[tuple[Optimizer, nn.Module | None]] = []
    for number, optimizer in enumerate(optimizers):
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        module = next((module for module, held in zip(modules, parameters, strict=True) if own <= held), None)
        if module is None and len(optimizers) > 1:
            raise RobustCheckpointError(
                f"optimizer {key}[{number}] has parameters that are in no module of the state dict, so they have no "
                'names: pass the module as well, {"model": model, "optimizers": optimizers}'
            )
        found.append((optimizer, module))
    return found


def _merge(values: StateDict, more: StateDict) -> None:
    """Add the state dict of another optimizer to ``values``."""
    for name, value in more.items():
        if name == "state" and name in values:
            values[name].update(value)
        elif name == "param_groups" and name in values:
            values[name].extend(value)
        else:
            values[name] = value


def _without_state(values: StateDict) -> StateDict:
    if "state" in values:
        return {**values, "state": {}}
    return {name: value for name, value in values.items() if not name.startswith("state.")}


def _any_stored(key: str, names: Iterable[str], stored: Container[str]) -> bool:
    return any(f"{key}.{name}" in stored for name in names)


def _leaf_names(values: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """The names that the leaves of nested dicts have in a checkpoint."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaf_names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
