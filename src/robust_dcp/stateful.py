"""Handles values in a state dict that have a state dict of their own, such as modules and optimizers.

Owns what is saved in place of such a value, and the stand-in that is loaded in its place. Modules and optimizers have
the names of ``get_model_state_dict`` and ``get_optimizer_state_dict``
(``torch/distributed/checkpoint/state_dict.py``), so they are the same under DDP, FSDP2, tensor parallelism,
``torch.compile`` and activation checkpointing. A stand-in decides what is asked for, and refuses what its
``load_state_dict`` would refuse later. This module also refuses a state dict that is not a dict.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as named
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from robust_dcp.errors import CorruptCheckpoint, PlanConflict, RobustCheckpointError
from robust_dcp.names import StoredNames, bare_name, bare_names, names_of_parameters, without_wrappers

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_EXTRA_STATE: Final = nn.modules.module._EXTRA_STATE_KEY_SUFFIX

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


def _add(values: StateDict, prefix: str, more: Mapping[str, Any]) -> None:
    """Add what one of several modules or optimizers holds to what the others hold.

    Raises:
        PlanConflict: two of them hold different values of one name. Stages may hold the same buffer.
    """
    for name, value in more.items():
        if name in values and not _are_equal(values[name], value):
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


@contextmanager
def _sharded(module: nn.Module) -> Iterator[None]:
    """Within it, the state dict of ``module`` has sharded parameters if FSDP1 has sharded them."""
    if not _is_of_fsdp1(module):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
            yield


def _state_dict_of(module: nn.Module) -> StateDict:
    with _sharded(module):
        return module.state_dict()


def _named_values(key: str, module: nn.Module, held: StateDict) -> dict[str, str]:
    """For each name in the state dict of a module, the one that it has in a checkpoint.

    Raises:
        PlanConflict: two values have one name, because a wrapper has a value of its own.
    """
    names = bare_names(module, held)
    if len(set(names.values())) < len(names):
        [name] = [each for each, count in Counter(names.values()).items() if count > 1][:1]
        raise PlanConflict(
            f"'{key}.{name}' is the name of two values of one module: one of them belongs to a wrapper; rename it",
            key=f"{key}.{name}",
        )
    return names


def _saved_values(key: str, modules: list[nn.Module]) -> StateDict:
    """The parameters and buffers of the modules under one key: of one module, or of the pipeline stages here."""
    values: StateDict = {}
    for module in modules:
        held = _state_dict_of(module)
        names = _named_values(key, module, held)
        _add(values, key, {names[name]: value for name, value in held.items()})
    return values


class ModuleStates:
    """The parameters and buffers to load of the modules under one key of a state dict.

    Args:
        key: the prefix of their names in the checkpoint.
        modules: one module, or the pipeline stages that this rank holds.
        stored: the names in the checkpoint.

    Raises:
        PlanConflict: a module is on the meta device.
    """

    def __init__(self, key: str, modules: list[nn.Module], stored: StoredNames) -> None:
        self._modules = modules
        self._held: list[tuple[StateDict, dict[str, str]]] = []
        self.values: StateDict = {}
        for module in modules:
            held = _state_dict_of(module)
            names = _named_values(key, module, held)
            # Stock's save({"model": DDP(model)}) names a parameter "module.weight".
            n_as_held, n_bare = (sum(stored.has(f"{key}.{name}") for name in each) for each in (held, names.values()))
            if n_as_held > n_bare:
                names = {name: name for name in held}
            own = set(names.values())
            for name, bare in names.items():
                if not stored.has(f"{key}.{bare}"):
                    names[name] = stored.under_wrappers(key, bare, own) or bare
            for name, value in held.items():
                if isinstance(value, torch.Tensor) and value.device.type == "meta":
                    raise PlanConflict(  # torch would only warn, and load nothing
                        f"'{key}.{names[name]}' cannot be loaded into: its module is on the meta device; call "
                        "module.to_empty(device=...) first",
                        key=f"{key}.{names[name]}",
                    )
                self.values[names[name]] = _of_stored_size(f"{key}.{names[name]}", value, stored)
            self._held.append((held, names))

    def put_back(self, loaded: StateDict) -> None:
        """Load the state into the modules."""
        for module, (held, names) in zip(self._modules, self._held, strict=True):
            held.update({name: loaded[stored] for name, stored in names.items()})  # it knows the versions of its parts
            with _sharded(module):
                module.load_state_dict(held)


def _of_stored_size(name: str, value: Any, stored: StoredNames) -> Any:
    """What to read into for a value of a module. Only the module knows what its extra state means, so it is loaded as
    it was saved, whatever the size of the one that is there.
    """
    is_extra = name.rpartition(".")[2] == _EXTRA_STATE and stored.has(name)
    return stored.targets(name, value) if is_extra else value


@dataclass(eq=False)
class _Parameter:
    """A parameter of an optimizer.

    Attributes:
        names: all names; several if it is tied. It is saved under the first.
        tensor: ``None`` if FSDP1 has put it into one with others.
        state: what its optimizer holds for it, or makes in a step.
        stored: the name under which the checkpoint has its state.
        is_made: whether the state was made for this load.
    """

    names: list[str]
    tensor: nn.Parameter | None
    state: Mapping[Any, Any] = field(default_factory=dict)
    stored: str | None = None
    is_made: bool = False


@dataclass(eq=False)
class _Optimizer:
    """An optimizer, and the module that has its parameters.

    Without a module the parameters are named by their numbers, as in ``Optimizer.state_dict``.

    Attributes:
        groups: the parameters of each group. ``options``: what else a group has.
        made: states that were made for a load.
    """

    optimizer: Optimizer
    module: nn.Module | None
    groups: list[list[_Parameter]]
    options: list[StateDict]
    made: dict[torch.Tensor, Any] = field(default_factory=dict)

    @property
    def is_of_fsdp1(self) -> bool:
        return _is_of_fsdp1(self.module)

    @property
    def parameters(self) -> list[_Parameter]:
        return [parameter for group in self.groups for parameter in group]

    def load(self, state: dict[Any, Any], groups: list[StateDict]) -> None:
        """Load states and groups, by number, or by name for FSDP1."""
        if not self.is_of_fsdp1:
            self.optimizer.load_state_dict({"state": state, "param_groups": groups})
            return
        # Torch sets the states of all parameters. It loses the options of a group without any, unless it is the last.
        state.update({each.names[0]: each.state for each in self.parameters if each.stored is None})
        groups.sort(key=lambda group: not group["params"])
        self.optimizer.state.update(self.made)
        with _as_trained(self.optimizer.state):
            named.set_optimizer_state_dict(self.module, self.optimizer, {"state": state, "param_groups": groups})  # type: ignore[arg-type]
        for each in self.parameters:
            if each.stored is None and each.tensor is not None:
                self.optimizer.state.pop(each.tensor, None)


def _is_of_fsdp1(module: nn.Module | None) -> bool:
    return module is not None and bool(FullyShardedDataParallel.fsdp_modules(module))


def _described(key: str, optimizer: Optimizer, module: nn.Module | None) -> _Optimizer:
    """An optimizer with what it holds now.

    Raises:
        RobustCheckpointError: it has a state of something else than a parameter.
    """
    if module is not None and _is_of_fsdp1(module):
        # Only torch knows how: one state belongs to several parameters, or to parts of them on several ranks.
        held: Any = named.get_optimizer_state_dict(module, optimizer)
    else:
        held = optimizer.state_dict()
    options = [{name: value for name, value in group.items() if name != "params"} for group in held["param_groups"]]
    described = _Optimizer(optimizer, module, [], options)
    names = {} if module is None else names_of_parameters(module)
    others = dict(held["state"])
    for group, own in zip(held["param_groups"], optimizer.param_groups, strict=True):
        tensors = own["params"] if len(own["params"]) == len(group["params"]) else [None] * len(group["params"])
        parameters = []
        for name, tensor in zip(group["params"], tensors, strict=True):
            is_number = isinstance(name, int)
            names_of_tensor = [str(name)] if module is None or not is_number else names[id(tensor)]
            parameters.append(_Parameter(names_of_tensor, tensor, others.pop(name, {})))
        described.groups.append(parameters)
    if others:
        raise RobustCheckpointError(
            f"the states of {key!r} have no names: {type(optimizer).__name__} has a state of {next(iter(others))!r}, "
            "which is none of its parameters. Pass its state_dict()"
        )
    return described


def _saved_states(key: str, owned: _Owned) -> StateDict:
    """What is saved of the optimizers under one key.

    A parameter has a state from its first step with a gradient on. So an optimizer may have a state for none of its
    parameters, or only for some: an expert without tokens has had no gradient. Such states are saved as they are.
    """
    by_parameter = owned.by_parameter
    values: StateDict = {} if by_parameter else {"state": {}, "param_groups": []}
    for optimizer, module in owned.optimizers:
        if module is None:
            return dict(optimizer.state_dict())
        had = set(optimizer.state)
        described = _described(key, optimizer, module)
        state = {each.names[0]: each.state for each in described.parameters if each.state}
        if described.is_of_fsdp1:
            state = state if had else {}  # torch has made one
            for tensor in set(optimizer.state) - had:
                del optimizer.state[tensor]
        if by_parameter:
            _add(values, key, dict(_leaves({"state": state})))
        else:
            _add(values["state"], f"{key}.state", state)
        for group, options in zip(described.groups, described.options, strict=True):
            names = [each.names[0] for each in group]
            if by_parameter:
                for name in names:
                    _add(values, key, {f"param_groups.{name}.{option}": value for option, value in options.items()})
            else:
                values["param_groups"].append({**options, "params": names})
    return values


def _saved_lists(key: str, stored: StoredNames) -> list[list[Any]] | None:
    """The parameters of each saved group. ``None`` if the checkpoint has no groups, or another node has their file."""
    names, groups = list[str](), f"{key}.param_groups"
    while f"{groups}.{len(names)}.params" in stored:
        names.append(f"{groups}.{len(names)}.params")
    if not names and groups not in stored:
        return None
    values = stored.read_objects(names or [groups])
    if values is None:
        return None
    lists = [values[name] for name in names] if names else [group["params"] for group in values[groups]]
    if not all(isinstance(each, list) for each in lists):
        raise CorruptCheckpoint(
            f"the parameter groups of {key!r} do not list their parameters",
            item=(names or [groups])[0],
            expected="a list of parameters for each group",
            found=", ".join(type(each).__name__ for each in lists),
        )
    return lists


def _check_sizes(key: str, optimizer: Optimizer, lists: list[list[Any]] | None) -> None:
    """Check what ``Optimizer.load_state_dict`` checks: that the parameter groups have the sizes of the saved ones."""
    if lists is None:
        return
    here, saved = [len(group["params"]) for group in optimizer.param_groups], list(map(len, lists))
    if here != saved:
        raise PlanConflict(
            f"the parameter groups of {key!r} have {here} parameters here and {saved} in the checkpoint",
            key=f"{key}.param_groups",
        )


class OptimizerStates:
    """The states and parameter groups to load of the optimizers under one key of a state dict.

    The load asks for what the checkpoint has, whatever the optimizers have. Parameters that its parameter groups list,
    and that have no state there, never had a gradient: they have no state afterwards, as in a new optimizer. Of other
    parameters without a state nothing is known, so their states are asked for, and the planner finds them missing.

    States that are made only to be read into are taken out of the optimizer at once, or training would go on with a
    step count of one.

    Args:
        key: the prefix of their names in the checkpoint.
        owned: the optimizers, each with the module that has its parameters.
        stored: the names in the checkpoint.

    Raises:
        PlanConflict: the parameter groups do not fit, or there are two states for a tied parameter.
    """

    def __init__(self, key: str, owned: list[tuple[Optimizer, nn.Module | None]], stored: StoredNames) -> None:
        self._key, self._stored = key, stored
        self._optimizers = []
        for optimizer, module in owned:
            had = set(optimizer.state)
            if _is_of_fsdp1(module):
                _make_states(optimizer, [each for group in optimizer.param_groups for each in group["params"]])
            described = _described(key, optimizer, module)
            self._take_out(described, had)
            self._optimizers.append(described)
        parameters = [each for held in self._optimizers for each in held.parameters]
        self._names = {name for each in parameters for name in each.names}
        for each in parameters:
            each.stored = self._name_of_state(each)
        self._groups_are_lists = f"{key}.param_groups.0.params" in stored or f"{key}.param_groups" in stored
        self._is_by_number = owned[0][1] is None
        self._lists: list[list[Any]] | None = None
        is_unclear = any(each.stored is None or any(map(str.isdigit, each.names)) for each in parameters)
        if is_unclear or self._is_by_number:
            self._lists = _saved_lists(key, stored)
        self._settle_names(parameters)
        unlisted = [each for each in parameters if each.stored is None and not self._is_listed(each)]
        for each in unlisted:
            each.stored = each.names[0]
        for held in self._optimizers:
            if not held.is_of_fsdp1:
                self._make_states(held)
        self.values: StateDict = {"state": {}, "param_groups": []}
        for each in parameters:
            if each.stored is not None:
                name = f"{key}.state.{each.stored}"
                values = _with_all(stored.targets(name, each.state, each.tensor), each.state)
                # If the optimizer does not make this state itself, it has what the others have.
                self.values["state"][each.stored] = values or dict.fromkeys(self._leaves_of_others(parameters))
        self._ask_for_groups()

    def _leaves_of_others(self, parameters: list[_Parameter]) -> list[str]:
        """What a state in the checkpoint consists of; nothing if there is none."""
        prefixes = (f"{self._key}.state.{each.stored}" for each in parameters if each.stored is not None)
        prefix = next(filter(self._stored.has, prefixes), None)
        return [] if prefix is None else [name[len(prefix) + 1 :] for name in self._stored.below(prefix)]

    def _name_of_state(self, parameter: _Parameter) -> str | None:
        """The name under which the checkpoint has a state of the parameter."""
        prefix = f"{self._key}.state"
        names = [name for name in parameter.names if self._stored.has(f"{prefix}.{name}")]
        if len(names) > 1:
            raise PlanConflict(
                f"the weights {names[0]!r} and {names[1]!r} are tied here and were not when {self._key!r} was saved: "
                "the checkpoint has a state for each of them; tie them after the load, or load without the optimizer",
                key=f"{prefix}.{names[0]}",
            )
        under_wrappers = (self._stored.under_wrappers(prefix, name, self._names) for name in parameter.names)
        return names[0] if names else next(filter(None, under_wrappers), None)

    def _settle_names(self, parameters: list[_Parameter]) -> None:
        """Name the states by numbers if the checkpoint does: stock has saved {"optimizer": optimizer}."""
        lists = self._lists
        if lists is None:
            return
        if any(isinstance(parameter, int) for names in lists for parameter in names) and len(self._optimizers) == 1:
            self._is_by_number = True
            for number, each in enumerate(parameters):
                each.names = [str(number)]
                each.stored = self._name_of_state(each)
        if self._is_by_number:
            _check_sizes(self._key, self._optimizers[0].optimizer, lists)

    def _is_listed(self, parameter: _Parameter) -> bool:
        """Whether the saved optimizer had this parameter."""
        if not self._groups_are_lists:
            return self._name_of_options(parameter) is not None
        if self._lists is None:
            return True  # nobody knows yet; put_back looks once more
        if self._is_by_number:
            # Without a state in the checkpoint there is nothing to lose, whatever its names are.
            return int(parameter.names[0]) in self._listed or not self._stored.has(f"{self._key}.state")
        return any(name in self._listed or without_wrappers(name) in self._listed_bare for name in parameter.names)

    @cached_property
    def _listed(self) -> set[Any]:
        return {name for names in self._lists or () for name in names}

    @cached_property
    def _listed_bare(self) -> set[Any]:
        """The listed names without the parts that wrappers add, of those that have no state either."""
        with_state = (name for name in self._listed if self._stored.has(f"{self._key}.state.{name}"))
        return set(map(bare_name, self._listed.difference(with_state)))

    def _name_of_options(self, parameter: _Parameter) -> str | None:
        """The name under which the checkpoint has the options of the parameter, where they are named by parameter."""
        prefix = f"{self._key}.param_groups"
        names = (name for name in parameter.names if self._stored.has(f"{prefix}.{name}"))
        return next(names, None) or self._stored.under_wrappers(prefix, parameter.names[0], self._names)

    def _take_out(self, held: _Optimizer, had: set[torch.Tensor]) -> None:
        held.made.update({each: held.optimizer.state.pop(each) for each in set(held.optimizer.state) - had})
        for each in held.parameters:
            each.is_made |= each.tensor in held.made

    def _make_states(self, held: _Optimizer) -> None:
        """Make the states that are to be loaded and that the optimizer does not have, as it makes them itself."""
        had = set(held.optimizer.state)
        missing = [each for each in held.parameters if each.stored is not None and each.tensor not in had]
        if missing:
            _make_states(held.optimizer, [each.tensor for each in missing if each.tensor is not None])
            self._take_out(held, had)
            for each in missing:
                each.is_made, each.state = True, held.made.get(each.tensor, {}) if each.tensor is not None else {}

    def _ask_for_groups(self) -> None:
        """Ask for the options that the checkpoint has. What only the optimizer has stays."""
        key, stored = f"{self._key}.param_groups", self._stored
        own = []
        for held in self._optimizers:
            # Without a common leaf it may be an optimizer of another class. Then all options are asked for.
            states = [each for each in held.parameters if each.stored is not None]
            is_another = bool(states) and not any(
                stored.has(f"{self._key}.state.{each.stored}.{leaf}")
                for each in states
                for leaf in map(str, each.state)
            )
            for group, options in zip(held.groups, held.options, strict=True):
                names = [each.names[0] for each in group]
                own.append((options, names, is_another))
                if self._groups_are_lists:
                    continue
                if not isinstance(self.values["param_groups"], dict):
                    self.values["param_groups"] = {}
                for each in group:
                    name = self._name_of_options(each) or each.names[0]
                    values = stored.targets(f"{key}.{name}", options)
                    self.values["param_groups"][name] = (
                        _with_all(values, options) if is_another or not values else values
                    )
        if not self._groups_are_lists:
            return
        n_saved = 0
        while stored.has(f"{key}.{n_saved}"):
            options, names, is_another = own[n_saved] if n_saved < len(own) else ({}, [], False)
            values = stored.targets(f"{key}.{n_saved}", options)
            self.values["param_groups"].append(_with_all(values, options) if is_another else values)
            n_saved += 1
        for options, names, _ in own[n_saved:]:  # the planner finds them missing, or knows their old names
            self.values["param_groups"].append({**options, "params": names})

    def _options_of(self, group: list[_Parameter], number: int, loaded: Any) -> StateDict:
        """The saved options of a group, which has this number among all groups."""
        options: StateDict = {}
        if isinstance(loaded, dict):
            names = (self._name_of_options(each) or each.names[0] for each in group)
            options = next((loaded[name] for name in names if name in loaded), {})
        else:
            if group and not self._is_by_number:
                names_of_group = {name for each in group for name in each.names}
                fitting = [n for n, each in enumerate(loaded) if names_of_group & set(each["params"])]
                if not fitting:  # they were saved under wrappers
                    bare = set(map(bare_name, names_of_group))
                    others = self._names - names_of_group
                    fitting = [
                        n
                        for n, each in enumerate(loaded)
                        if bare & {bare_name(p) for p in each["params"] if p not in others}
                    ]
                number = fitting[0] if fitting else number
            if number < len(loaded):
                options = loaded[number]
        return {name: value for name, value in options.items() if name not in ("params", "param_names")}

    def put_back(self, loaded: StateDict) -> None:
        """Load the state into the optimizers."""
        groups, number_of_group = loaded["param_groups"], 0
        if self._groups_are_lists and self._lists is None:
            self._lists = [group["params"] for group in groups]
            for each in (each for held in self._optimizers for each in held.parameters):
                if each.stored is None and not self._is_listed(each):
                    raise PlanConflict(
                        f"the checkpoint has no state of '{self._key}.state.{each.names[0]}', and its parameter groups "
                        "do not list this parameter",
                        key=f"{self._key}.state.{each.names[0]}",
                    )
        for held in self._optimizers:
            state, param_groups, number = dict[Any, Any](), list[StateDict](), 0
            for group, options in zip(held.groups, held.options, strict=True):
                names: list[Any] = []
                for each in group:
                    name = each.names[0] if held.is_of_fsdp1 else number
                    names.append(name)
                    number += 1
                    # In a partial load, a parameter that the checkpoint does not know keeps the state that it has.
                    is_there = self._stored.has(f"{self._key}.state.{each.stored}")
                    if each.stored is not None and (is_there or not each.is_made):
                        state[name] = loaded["state"][each.stored]
                saved = self._options_of(group, number_of_group, groups)
                param_groups.append({**options, **saved, "params": names})
                number_of_group += 1
            held.load(state, param_groups)


def _with_all(values: Any, held: Mapping[Any, Any]) -> Any:
    """``values`` with what only ``held`` has, so that it is asked for too."""
    if not isinstance(values, dict):
        return values
    merged = {**held, **values}
    for key, each in values.items():
        if isinstance(held.get(key), Mapping):
            merged[key] = _with_all(each, held[key])
    return merged


def _leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, by the names that they have in a checkpoint."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _make_states(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    """Make states for parameters that have none, as torch does it: by a step with gradients of zero and a learning rate
    of zero. Without that, nobody knows how they are sharded. An optimizer that cannot step so has none afterwards.
    """
    of_groups = [
        (group, {key: value for key, value in group.items() if key != "params"}) for group in optimizer.param_groups
    ]
    held = [(parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"]]
    wanted = {id(each) for each in parameters}
    try:
        for parameter, _ in held:
            parameter.grad = torch.zeros_like(parameter) if id(parameter) in wanted else None
        for group, options in of_groups:
            if "lr" in options:
                group["lr"] = torch.tensor(0.0) if isinstance(options["lr"], torch.Tensor) else 0.0
        with suppress(Exception):
            optimizer.step()
    finally:
        for group, options in of_groups:
            group.update(options)
        for parameter, gradient in held:
            parameter.grad = gradient


@contextmanager
def _as_trained(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Torch sets no states of parameters that are frozen. They are not, within this block."""
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


class NamesOfStock(StateDict):
    """A state dict in which modules and optimizers have the names that stock gives them: those of their own
    ``state_dict``. As in stock, a list of them is an object like any other."""


class AsStock:
    """The stand-in for a ``Stateful`` value. As in stock, the names are those of its ``state_dict``.

    Raises:
        PlanConflict: the parameter groups of an optimizer are not those of the checkpoint.
    """

    def __init__(self, key: str, value: Stateful, stored: StoredNames) -> None:
        self._value = value
        self.values: Any = value.state_dict()
        if isinstance(value, nn.Module):
            for name, each in self.values.items():
                self.values[name] = _of_stored_size(f"{key}.{name}", each, stored)
        elif isinstance(value, Optimizer) and type(value).load_state_dict is Optimizer.load_state_dict:
            _check_sizes(key, value, _saved_lists(key, stored))

    def put_back(self, loaded: Any) -> None:
        self._value.load_state_dict(loaded)


StandIn = ModuleStates | OptimizerStates | AsStock
"""Takes the place of a module, optimizer or other ``Stateful`` value while it is loaded. Its ``values`` are the state
dict, and ``put_back`` loads what was read into them."""


@dataclass(eq=False)
class _Owned:
    """The optimizers under a key, each with the module that has its parameters.

    Attributes:
        by_parameter: whether the options of parameter groups are saved by the names of parameters too. torchtitan does
            this for pipeline stages, because their groups differ between ranks.
    """

    optimizers: list[tuple[Optimizer, nn.Module | None]]
    by_parameter: bool


def _stateful_values(state_dict: StateDict) -> Iterator[tuple[str, list[nn.Module] | _Owned | Stateful]]:
    """The values that have a state dict of their own, by key: modules, optimizers, and others.

    Raises:
        RobustCheckpointError: the state dict is something else than a dict; or there are several optimizers under a
            key, and no module has the parameters of one.
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
            if names_are_ours and (held := _all_of(value, nn.Module)):
                modules[key] = held
    for key, value in candidates.items():
        if key in modules:
            yield key, modules[key]
        elif names_are_ours and (optimizers := _all_of(value, Optimizer)):
            all_modules = [module for each in sorted(modules, key=str) for module in modules[each]]
            has_stages = any(isinstance(candidates[each], list | tuple) for each in modules)
            yield key, _Owned(_with_modules(key, optimizers, all_modules), has_stages)
        elif hasattr(value, "state_dict") and isinstance(value, Stateful):  # the second one alone takes 14 us
            yield key, value


def values_to_save(state_dict: StateDict) -> StateDict:
    """The state dict with the state dicts of its modules, optimizers and ``Stateful`` values in their place.

    Raises:
        RobustCheckpointError: as :func:`_stateful_values`; or an optimizer has a state of something else than a
            parameter.
        PlanConflict: two modules or two optimizers under a key hold different values of one name.
    """
    stateful = list(_stateful_values(state_dict))
    values = dict(state_dict)
    for key, value in stateful:
        if isinstance(value, _Owned):
            values[key] = _saved_states(key, value)
        else:
            values[key] = _saved_values(key, value) if isinstance(value, list) else value.state_dict()
    return values


def values_to_compare(state_dict: StateDict, stored: StoredNames) -> StateDict:
    """The same, with the names by which the checkpoint to compare with has the states of optimizers: of parameters, or
    their numbers, as stock saves an optimizer. Options of parameter groups that only the optimizer has are left out: a
    load leaves them as they are.

    Raises:
        RobustCheckpointError, PlanConflict: as :func:`values_to_save`.
    """
    values = values_to_save(state_dict)
    for key, value in _stateful_values(state_dict):
        if not isinstance(value, _Owned):
            continue
        groups = f"{key}.param_groups"
        lists = _saved_lists(key, stored)
        if len(value.optimizers) == 1 and any(isinstance(each, int) for names in lists or () for each in names):
            values[key] = value.optimizers[0][0].state_dict()
        elif stored.has(groups) and value.by_parameter != (lists is None):
            values[key] = _saved_states(key, _Owned(value.optimizers, by_parameter=lists is None))
        if isinstance(values[key].get("param_groups"), list):
            for number, group in enumerate(values[key]["param_groups"]):
                if stored.has(f"{groups}.{number}"):
                    for option in [each for each in group if not stored.has(f"{groups}.{number}.{each}")]:
                        del group[option]
    return values


def stand_ins_for(state_dict: StateDict, stored: StoredNames) -> tuple[dict[str, StandIn], StateDict]:
    """The stand-ins for the values to load that have a state dict of their own, by key.

    Returns:
        they, and the state dict with their values in it.

    Raises:
        RobustCheckpointError: as :func:`_stateful_values`.
        PlanConflict: what is there does not fit the checkpoint, or a module is on the meta device.
    """
    stand_ins: dict[str, StandIn] = {}
    for key, value in _stateful_values(state_dict):
        if isinstance(value, _Owned):
            stand_ins[key] = OptimizerStates(key, value.optimizers, stored)
        elif isinstance(value, list):
            stand_ins[key] = ModuleStates(key, value, stored)
        else:
            stand_ins[key] = AsStock(key, value, stored)
    values = dict(state_dict)
    for key, stand_in in stand_ins.items():
        values[key] = stand_in.values
    return stand_ins, values
