"""Handles values in a state dict that have a state dict of their own, such as modules and optimizers.

Owns the stand-in that is saved or loaded in place of such a value, and the names of modules and optimizers in a
checkpoint. They are those of ``get_model_state_dict`` and ``get_optimizer_state_dict``
(``torch/distributed/checkpoint/state_dict.py``), so they are the same under DDP, FSDP2, tensor parallelism and
``torch.compile``. It also refuses a state dict that is not a dict.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as named
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from robust_dcp.errors import PlanConflict, RobustCheckpointError

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_EMPTY_IS_NO_ERROR = named.StateDictOptions(strict=False)
"""For modules without parameters and buffers, for which torch raises by default."""

StateDict = dict[str, Any]


def _all_of(value: Any, kind: type[Any]) -> list[Any]:
    """The modules, or the optimizers, in a value of a state dict: it is one, or a list of them (pipeline stages).

    There are none if one has a ``state_dict`` of its own. It has its own names, which we keep.
    """
    values = value if isinstance(value, list | tuple) else [value]
    for each in values:
        if not isinstance(each, kind) or type(each).state_dict is not kind.state_dict or "state_dict" in vars(each):
            return []
    return list(values)


def _add(values: StateDict, prefix: str, more: Mapping[str, Any], stored: Container[str] | None) -> None:
    """Add what one of several modules or optimizers holds to what the others hold.

    Raises:
        PlanConflict: in a save, two of them hold different values of one name. Stages may hold the same buffer.
    """
    for name, value in more.items():
        if stored is None and name in values and not _are_equal(values[name], value):
            raise PlanConflict(
                f"the state dict has two values that flatten to the name '{prefix}.{name}' (two modules or optimizers "
                "that are not stages of one model); give each module and each optimizer a key of its own",
                key=f"{prefix}.{name}",
            )
        values[name] = value


def _are_equal(one: Any, other: Any) -> bool:
    one, other = (each.to_local() if isinstance(each, DTensor) else each for each in (one, other))
    return one is other or (
        isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other.to(one.device))
    )


class ModuleStates:
    """The parameters and buffers of the modules under one key of a state dict.

    Args:
        key: the prefix of their names in the checkpoint.
        modules: one module, or the pipeline stages that this rank holds.
        stored: the names in the checkpoint to load; ``None`` for a save.

    Raises:
        PlanConflict: in a load, a module is on the meta device.
    """

    def __init__(self, key: str, modules: list[nn.Module], stored: Container[str] | None = None) -> None:
        self._modules = modules
        states = [named.get_model_state_dict(module, options=_EMPTY_IS_NO_ERROR) for module in modules]
        self._names = [list(state) for state in states]
        self.values: StateDict = {}
        for state in states:
            _add(self.values, key, state, stored)
        self._is_as_held = False
        if stored is None:
            return
        # torch would only warn, and load nothing. That of 2.7 leaves what is on the meta device out of the state dict.
        on_meta = [module for module in modules if any(parameter.is_meta for parameter in module.parameters())]
        held = {n.replace("_orig_mod.", ""): value for each in on_meta for n, value in each.state_dict().items()}
        for name, value in (self.values | held).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise PlanConflict(
                    f"'{key}.{name}' cannot be loaded into: its module is on the meta device; call "
                    "module.to_empty(device=...) first",
                    key=f"{key}.{name}",
                )
        if all(f"{key}.{name}" in stored for name in _leaf_names(self.values)):
            return
        as_held = {name: value for module in modules for name, value in module.state_dict().items()}
        # Stock's save({"model": DDP(model)}) names a parameter "module.weight"; of a compiled part, only some are such.
        if _n_stored(key, as_held, stored) > _n_stored(key, self.values, stored):
            self._is_as_held, self.values = True, as_held

    def put_back(self, loaded: StateDict) -> None:
        """Load the state into the modules."""
        for module, names in zip(self._modules, self._names, strict=True):
            if self._is_as_held:
                module.load_state_dict(loaded)
            elif names:
                while isinstance(module, DistributedDataParallel | torch._dynamo.OptimizedModule):
                    # Torch gives the second name of a shared submodule no prefix. What is within has none.
                    [module] = module.children()
                named.set_model_state_dict(module, {name: loaded[name] for name in names})


class OptimizerStates:
    """The states and parameter groups of the optimizers under one key of a state dict.

    A parameter has a state from its first step with a gradient on. So an optimizer may have a state for none of its
    parameters, or only for some: an expert without tokens has had no gradient. Such states are saved as they are. A
    load asks for what the checkpoint has, whatever the optimizer has. Parameters without a state there have none
    afterwards, as in a new optimizer.

    ``get_optimizer_state_dict`` makes an optimizer without state step with a learning rate of zero. States that are
    made only to be saved or to be read into are taken out of the optimizer at once, or training would go on with a step
    count of one.

    Args:
        key: the prefix of their names in the checkpoint.
        optimizers: each with the module that has its parameters. Without such a module the state is named by the
            numbers of the parameters, as in ``Optimizer.state_dict``.
        by_parameter: whether the options of parameter groups are named by parameter too. torchtitan does this for
            pipeline stages, because their groups differ between ranks.
        stored: the names in the checkpoint to load; ``None`` for a save.

    Raises:
        RobustCheckpointError: torch cannot name the states. The error names the optimizer.
    """

    def __init__(
        self,
        key: str,
        optimizers: list[tuple[Optimizer, nn.Module | None]],
        *,
        by_parameter: bool = False,
        stored: Collection[str] | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._options = named.StateDictOptions(flatten_optimizer_state_dict=by_parameter)
        self._is_as_held = False
        self.values: StateDict = {}
        self._made: list[dict[torch.Tensor, Any]] = []
        self._without_state: list[tuple[Optimizer, nn.Parameter]] = []
        self._unstored: StateDict = {}
        before = [set(optimizer.state) for optimizer, _ in optimizers]
        for optimizer, module in optimizers:
            is_empty = stored is None and not optimizer.state
            try:
                with _as_trained([] if stored is None else self._frozen_with_state(key, optimizer, module, stored)):
                    if stored is not None:
                        _make_missing_state(optimizer)
                    own = dict(
                        optimizer.state_dict()
                        if module is None
                        else named.get_optimizer_state_dict(module, optimizer, options=self._options)
                    )
            except Exception as error:
                raise RobustCheckpointError(
                    f"the states of {key!r} have no names: torch names what a step without gradients makes, "
                    f"and {type(optimizer).__name__} raises {type(error).__name__}: {error}. Pass its state_dict()"
                ) from error
            if is_empty:  # leave out the state that get_optimizer_state_dict has made
                own = {name: value for name, value in own.items() if not name.startswith("state.")}
                own.update({"state": {}} if "state" in own else {})
            if "state" in self.values:  # that of the other optimizers
                _add(self.values["state"], f"{key}.state", own.pop("state"), stored)
                self.values["param_groups"] += own.pop("param_groups")
            _add(self.values, key, own, stored)
        if stored is not None:
            self._choose_names(key, stored)
        for (optimizer, _), had in zip(optimizers, before, strict=True):
            made = [parameter for parameter in optimizer.state if parameter not in had]
            self._made.append({parameter: optimizer.state.pop(parameter) for parameter in made})

    def _choose_names(self, key: str, stored: Container[str]) -> None:
        """Use the names that the checkpoint has: those of parameters, or numbers. Ask for no state that it lacks."""
        if not _n_stored(key, self.values, stored, "state."):
            as_held = dict(self._optimizers[0][0].state_dict())
            if _n_stored(key, as_held, stored, "state."):  # stock saved {"optimizer": optimizer}
                self._is_as_held, self.values = True, as_held
        for optimizer, module in self._optimizers:
            for name, parameter in self._parameters_by_name(optimizer, module):
                leaves = [f"state.{name}.{leaf}" for leaf in _leaf_names(optimizer.state.get(parameter, {}))]
                if not leaves or any(f"{key}.{leaf}" in stored for leaf in leaves):
                    continue
                # Keep the state for torch, which sets the states of all parameters.
                self._without_state.append((optimizer, parameter))
                if "state" in self.values:
                    self.values["state"] = dict(self.values["state"])
                    self._unstored[name] = self.values["state"].pop(name)  # type: ignore[index]
                else:
                    self._unstored.update({leaf: self.values.pop(leaf) for leaf in leaves})

    def _parameters_by_name(
        self, optimizer: Optimizer, module: nn.Module | None
    ) -> list[tuple[str | int, nn.Parameter]]:
        """The parameters with the names that their states have in :attr:`values`.

        The list is empty if they cannot be told apart: FSDP1 puts many into one.
        """
        parameters = _parameters(optimizer)
        if module is None or self._is_as_held:
            return list(enumerate(parameters))
        groups: Any = named.get_optimizer_state_dict(module, optimizer)["param_groups"]
        names = [name for group in groups for name in group["params"]]
        return list(zip(names, parameters, strict=True)) if len(names) == len(parameters) else []

    def _frozen_with_state(
        self, key: str, optimizer: Optimizer, module: nn.Module | None, stored: Collection[str]
    ) -> list[nn.Parameter]:
        """The parameters that are frozen now and have a state in the checkpoint, because they were trained before."""
        if all(each.requires_grad for each in _parameters(optimizer)):
            return []
        with_state = {name.rpartition(".")[0] for name in stored}
        by_name = self._parameters_by_name(optimizer, module)
        return [each for name, each in by_name if f"{key}.state.{name}" in with_state]

    def put_back(self, loaded: StateDict) -> None:
        """Load the state into the optimizers."""
        groups = loaded.get("param_groups", [])
        if any(isinstance(parameter, int) for group in groups for parameter in group["params"]):
            self._is_as_held = True  # stock saved {"optimizer": optimizer} before its first step
        elif "state" in self.values:
            # Torch loses the options of a group without parameters, unless it is the last one.
            groups.sort(key=lambda group: not group["params"])
            loaded = {**loaded, "state": {**loaded.get("state", {}), **self._unstored}}
        else:
            loaded = {**loaded, **self._unstored}
        for (optimizer, module), made in zip(self._optimizers, self._made, strict=True):
            optimizer.state.update(made)
            if module is None or self._is_as_held:
                optimizer.load_state_dict(loaded)
            else:
                with _as_trained(optimizer.state):
                    named.set_optimizer_state_dict(module, optimizer, loaded, options=self._options)
        for optimizer, parameter in self._without_state:
            optimizer.state.pop(parameter, None)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _make_missing_state(optimizer: Optimizer) -> None:
    """Make states for the parameters that have none, as torch makes them if no parameter has one: by a step with
    gradients of zero and a learning rate of zero. Where torch finds gradients, as after ``backward()``, it makes none,
    and the load would not ask for what the checkpoint has."""
    held = [(parameter, parameter.grad) for parameter in _parameters(optimizer)]
    missing = {id(each) for each, _ in held if each.requires_grad and each not in optimizer.state}
    if not missing:
        return
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for parameter, _ in held:
            parameter.grad = torch.zeros_like(parameter) if id(parameter) in missing else None
        for group, rate in rates:
            group["lr"] = torch.tensor(0.0) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for parameter, gradient in held:
            parameter.grad = gradient


@contextmanager
def _as_trained(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Torch makes and sets no states of parameters that are frozen. They are not, within this block."""
    frozen = [each for each in parameters if not each.requires_grad]
    try:
        for each in frozen:
            each.requires_grad_(True)
        yield
    finally:
        for each in frozen:
            each.requires_grad_(False)


def _with_modules(
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


def _n_stored(key: str, values: StateDict, stored: Container[str], prefix: str = "") -> int:
    """How many leaves of ``values`` with names that begin with ``prefix`` are stored below ``key``."""
    return sum(name.startswith(prefix) and f"{key}.{name}" in stored for name in _leaf_names(values))


def _leaf_names(values: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """The names that the leaves of nested dicts have in a checkpoint."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaf_names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


class NamesOfStock(StateDict):
    """A state dict in which modules and optimizers have the names that stock gives them: those of their own
    ``state_dict``. As in stock, a list of them is an object like any other."""


class AsStock:
    """The stand-in for a ``Stateful`` value. As in stock, the names are those of its ``state_dict``."""

    def __init__(self, value: Stateful) -> None:
        self._value = value

    @cached_property
    def values(self) -> Any:
        return self._value.state_dict()

    def put_back(self, loaded: Any) -> None:
        self._value.load_state_dict(loaded)


StandIn = ModuleStates | OptimizerStates | AsStock
"""Takes the place of a module, optimizer or other ``Stateful`` value while it is saved or loaded. Its ``values`` are
the state dict, and ``put_back`` loads what was read into them."""


def stand_ins_for(state_dict: StateDict, stored: Collection[str] | None = None) -> tuple[dict[str, StandIn], StateDict]:
    """The stand-ins for values that have a state dict of their own, by key.

    Args:
        stored: the names in the checkpoint to load; ``None`` for a save.

    Returns:
        they, and the state dict with their values in it.

    Raises:
        RobustCheckpointError: the state dict is something else than a dict; or there are several optimizers under a
            key, and no module has the parameters of one, or torch cannot name the states of one.
        PlanConflict: two modules or two optimizers under a key hold different values of one name, or a module to load
            into is on the meta device.
    """
    if not isinstance(state_dict, Mapping):
        what_to_do = 'give it a name, {"name": value}'
        if isinstance(state_dict, Stateful):
            what_to_do = 'give it a name, {"model": model}, or pass its state dict, model.state_dict()'
        kind = type(state_dict).__name__
        raise RobustCheckpointError(f"a state dict is a dict, and a {kind} was passed: {what_to_do}")
    names_are_ours = not isinstance(state_dict, NamesOfStock)
    candidates, modules = StateDict(), dict[str, list[nn.Module]]()
    for key, value in state_dict.items():
        if type(value) not in _TENSORS:
            candidates[key] = value
            if names_are_ours and (found := _all_of(value, nn.Module)):
                modules[key] = found
    stand_ins: dict[str, StandIn] = {}
    for key, value in candidates.items():
        if key in modules:
            stand_ins[key] = ModuleStates(key, modules[key], stored)
        elif names_are_ours and (optimizers := _all_of(value, Optimizer)):
            all_modules = [module for each in sorted(modules, key=str) for module in modules[each]]
            has_stages = any(isinstance(candidates[each], list | tuple) for each in modules)
            owned = _with_modules(key, optimizers, all_modules)
            stand_ins[key] = OptimizerStates(key, owned, by_parameter=has_stages, stored=stored)
        elif hasattr(value, "state_dict") and isinstance(value, Stateful):  # the second one alone takes 14 us
            stand_ins[key] = AsStock(value)
    values = dict(state_dict)
    for key, stand_in in stand_ins.items():
        values[key] = stand_in.values
    return stand_ins, values
