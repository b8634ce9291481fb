"""State dicts of all kinds, saved and loaded crosswise: ``python -m torture.state_dicts --trials 2000 --seed 1``.

Each trial draws a model (names that mean something to others, tied and frozen parameters, wrappers within wrappers,
FSDP2 or DDP), an optimizer with its groups and a scheduler, and values of all types under odd names. It is saved by
stock, by stock's functions under the switch, and by robust_dcp, and each of the three checkpoints is loaded by each of
the three: into a model of other wrappers and another layout. robust_dcp gets modules and optimizers themselves in some
of the trials.

What a load leaves must be what was saved, or what stock leaves after a save of its own. An error is right only where
stock, which loads the same that stock has saved, raises one too.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import robust_dcp
from robust_dcp import RobustWriter
from tests.harness.fingerprints import differences
from torture.trials import Result, Trial, main

__all__ = ["make_trials"]

StateDict = dict[str, Any]


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "checkpoint": checkpoint_wrapper,
    "compile": _compiled,
    "compile(checkpoint)": lambda module: _compiled(checkpoint_wrapper(module)),
    "checkpoint(compile)": lambda module: checkpoint_wrapper(_compiled(module)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, 0.1),
    "SGD, momentum": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9),
    "Adam, amsgrad": lambda groups: torch.optim.Adam(groups, 0.1, amsgrad=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, 0.1),
    "AdamW, lr a tensor": lambda groups: torch.optim.AdamW(groups, torch.tensor(0.1)),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, 0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, 0.1, momentum=0.5, centered=True),
    "NAdam": lambda groups: torch.optim.NAdam(groups, 0.1),
    "Adadelta": torch.optim.Adadelta,
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    "CosineAnnealingLR": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
}
LAYOUTS = ("plain", "FSDP2", "DDP")
WAYS = ("stock", "switched", "ours")
_NAMES = ("a", "module", "0", "état", "state", "param_groups", "params", "lr", "exp_avg", "weight_", "_x", "optim")
_KEYS = ("a", "a.b", "x/y", "0", "step", "ünï", "state", " ", "model", "deep.0.weight")
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float16, torch.uint8)


class Case(NamedTuple):
    """What is saved, and into what it is loaded.

    Attributes:
        names: of the blocks of the model.
        wrappers: of each block and, at last, of the whole, when saved and when loaded.
        layouts: when saved and when loaded.
        steps: of training before the save, and before the load.
        values: the seed of the values beside the model.
        changed: ``fewer`` if the target lacks a value, ``more`` if it has one that was not saved, else empty.
        modules: whether robust_dcp is given the modules themselves.
        files: the layout of robust_dcp's files. Stock's reader reads ``torch``.
    """

    names: list[str]
    wrappers: tuple[list[str], list[str]]
    layouts: tuple[str, str]
    optimizer: str
    n_groups: int
    scheduler: str
    is_tied: bool
    is_frozen: bool
    is_flat: bool
    steps: tuple[int, int]
    values: int
    changed: str
    modules: bool
    files: str


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(f"state dicts {seed}")
    names = rng.sample(_NAMES, rng.randint(1, 4))
    # Stock finds no parameter of a compiled model in one that is not: half of the trials have only what stock finds.
    kinds = list(WRAPPERS) if rng.random() < 0.5 else ["plain", "checkpoint"]
    wrappers = tuple([rng.choice(kinds) for _ in range(len(names) + 1)] for _ in range(2))
    is_flat = rng.random() < 0.3
    modules = not is_flat and rng.random() < 0.6
    optimizer = rng.choice(list(OPTIMIZERS))
    return Case(
        names=names,
        wrappers=wrappers,  # type: ignore[arg-type]
        layouts=(rng.choice(LAYOUTS), rng.choice(LAYOUTS)),
        optimizer=optimizer,
        n_groups=rng.choice((1, 1, 2)),
        # With a learning rate that is a tensor, SequentialLR shares one value with its scheduler in a new target. What
        # stock reads last counts.
        scheduler=rng.choice([each for each in SCHEDULERS if each != "SequentialLR" or "tensor" not in optimizer]),
        is_tied=len(names) > 1 and rng.random() < 0.25,
        is_frozen=rng.random() < 0.25,
        is_flat=is_flat,
        # Before the first step stock saves states that it makes up, and robust_dcp none: stock finds them missing.
        steps=(rng.choice((1, 2) if modules else (0, 1, 2)), rng.choice((0, 0, 1))),
        values=rng.randrange(1 << 30),
        changed=rng.choice(("", "", "", "", "", "fewer", "fewer", "more")),
        modules=modules,
        files=rng.choice(("torch", "torch", "safetensors")),
    )


class Training:
    """A model, its optimizer, its scheduler, and values beside them, as a training loop has them."""

    def __init__(self, case: Case, side: int) -> None:
        self.case = case
        torch.manual_seed(case.values + side)
        blocks = [nn.Linear(4, 4) for _ in case.names]
        if case.is_tied:
            blocks[-1].weight = blocks[0].weight
        if case.is_frozen:
            blocks[0].bias.requires_grad_(False)
        model = nn.Module()
        for name, block, wrapper in zip(case.names, blocks, case.wrappers[side], strict=False):
            model.add_module(name, WRAPPERS[wrapper](block))
        model.register_buffer("count", torch.tensor(side))
        if case.layouts[side] == "FSDP2":
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model = WRAPPERS[case.wrappers[side][-1]](model)
        self.model = nn.parallel.DistributedDataParallel(model) if case.layouts[side] == "DDP" else model
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups: Any = parameters
        if case.n_groups == 2:
            groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.01 * (1 + side)}]
        self.optimizer = OPTIMIZERS[case.optimizer](groups)
        self.scheduler = SCHEDULERS[case.scheduler](self.optimizer)
        for _ in range(case.steps[side]):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
        self.values = values(case.values, side)
        if side == 1 and case.changed == "fewer":
            self.values.popitem()
        if side == 1 and case.changed == "more":
            self.values["only in the target"] = torch.zeros(2)

    def _beside(self) -> StateDict:
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}
        return {"values": self.values, **scheduler}

    def recipe(self) -> StateDict:
        """The state dict of PyTorch's recipes."""
        options = StateDictOptions(flatten_optimizer_state_dict=self.case.is_flat)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer, **self._beside()}

    def modules(self) -> StateDict:
        """The modules themselves, which robust_dcp takes."""
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler}
        return {"model": self.model, "optimizer": self.optimizer, "values": self.values, **scheduler}

    def take(self, state_dict: StateDict) -> None:
        """Take what was loaded into :meth:`recipe`."""
        options = StateDictOptions(flatten_optimizer_state_dict=self.case.is_flat)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
            options=options,
        )
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])
        self.values = state_dict["values"]

    def content(self) -> Any:
        """All that this holds, as plain values, under the names without wrappers."""
        whole = tree_map(lambda each: each.full_tensor() if isinstance(each, DTensor) else each, self.recipe())
        return {key: _unwrapped(each) if key in ("model", "optimizer") else each for key, each in whole.items()}


def _unwrapped(value: Any) -> Any:
    if isinstance(value, dict):
        return {_unwrapped(key): _unwrapped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_unwrapped(each) for each in value]
    return re.sub(r"_orig_mod\.|_checkpoint_wrapped_module\.", "", value) if isinstance(value, str) else value


def values(seed: int, side: int) -> StateDict:
    """Values of all types. Those of both sides have the same structure."""
    structure, content = random.Random(f"structure {seed}"), random.Random(f"content {seed} {side}")
    keys = structure.sample(_KEYS, structure.randint(1, 5))
    return {key: _value(structure, content, depth=0) for key in keys}


def _value(structure: random.Random, content: random.Random, depth: int) -> Any:
    number = content.randrange(1, 100)
    kinds = (
        "tensor",
        "tensor",
        "scalar",
        "view",
        "int",
        "text",
        "bytes",
        "none",
        "tuple",
        "time",
        "set",
        "size",
        "dtype",
    )
    kind = structure.choice(kinds if depth > 1 else (*kinds, "dict", "list", "ordered", "empty dict", "empty list"))
    if kind == "tensor":
        shape = structure.choice(((3,), (2, 3), (0, 2), (1, 1, 1), (70, 70)))
        return torch.full(shape, number).to(structure.choice(_DTYPES))
    if kind in ("dict", "ordered"):
        keys = structure.sample(_KEYS, structure.randint(1, 3))
        inner = {key: _value(structure, content, depth + 1) for key in keys}
        return OrderedDict(inner) if kind == "ordered" else inner
    if kind == "list":
        return [_value(structure, content, depth + 1) for _ in range(structure.randint(1, 3))]
    return {
        "scalar": torch.tensor(float(number)),
        "view": torch.full((4, 6), float(number)).t()[::2],
        "int": number,
        "text": f"ünï {number}",
        "bytes": bytes([number, 0]),
        "none": None,
        "tuple": (number, (0.5 * number, "x")),
        "time": datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc) + datetime.timedelta(days=number),
        "set": {number},
        "size": torch.Size([number, 2]),
        "dtype": content.choice(_DTYPES),
        "empty dict": {},
        "empty list": [],
    }[kind]


@contextlib.contextmanager
def _switch(way: str) -> Iterator[None]:
    """The switch, on for one of the ways. It says so each time, which nobody wants to read."""
    if way != "switched":
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        robust_dcp.install()
    try:
        yield
    finally:
        robust_dcp.uninstall()


def _save(way: str, training: Training, path: str) -> None:
    if way == "ours":
        state = training.modules() if training.case.modules else training.recipe()
        robust_dcp.save(state, storage_writer=RobustWriter(path, layout=training.case.files))
        return
    state = training.recipe()
    with _switch(way):
        dcp.save(state, checkpoint_id=path)


def _load(way: str, training: Training, path: str) -> None:
    if way == "ours" and training.case.modules:
        state = training.modules()
        robust_dcp.load(state, checkpoint_id=path)
        training.values = state["values"]
        return
    state = training.recipe()
    with _switch(way):
        (robust_dcp if way == "ours" else dcp).load(state, checkpoint_id=path)
    training.take(state)


def _error(function: Callable[..., None], *arguments: Any) -> BaseException | None:
    try:
        function(*arguments)
    except Exception as error:
        return error
    except dcp.CheckpointException as error:  # stock's is none of Exception
        return error
    return None


def _has_other_names(case: Case, saver: str, loader: str, target: Training) -> bool:
    """Whether stock's recipe asks for names with wrappers in a checkpoint of modules, whose names never have them."""
    is_recipe = loader != "ours" or not case.modules
    return (
        saver == "ours" and case.modules and is_recipe and any("_orig_mod." in key for key in target.recipe()["model"])
    )


def run(seed: int) -> Result:
    """Save by each way and load each by each."""
    case = draw(seed)
    directory = tempfile.mkdtemp(prefix="state-dicts-")
    complaints: list[str] = []
    try:
        expected = Training(case, 0).content()
        if case.changed == "fewer":
            expected["values"].popitem()
        by_stock: Any = None
        stock_error: BaseException | None = None
        for saver in WAYS:
            path = f"{directory}/{saver}"
            save_error = _error(_save, saver, Training(case, 0), path)
            if saver == "stock":
                stock_error = save_error
            for loader in WAYS:
                if case.files == "safetensors" and (saver, loader) == ("ours", "stock"):
                    continue
                target = Training(case, 1)
                error = save_error or _error(_load, loader, target, path)
                content = None if error else target.content()
                if (saver, loader) == ("stock", "stock"):
                    by_stock, stock_error = content, error
                    if error is not None:  # what it leaves if the target has the same wrappers
                        alike = Training(case._replace(wrappers=(case.wrappers[0],) * 2), 1)
                        by_stock = None if _error(_load, loader, alike, path) else alike.content()
                elif error is not None and stock_error is None and not _has_other_names(case, saver, loader, target):
                    complaints.append(
                        f"saved by {saver}, loaded by {loader}: {type(error).__name__}: {str(error)[-700:]}"
                    )
                elif error is None and (wrong := differences(expected, content)):
                    wrong = wrong if by_stock is None else differences(by_stock, content)
                    complaints += [f"saved by {saver}, loaded by {loader}: {wrong[:3]}"] if wrong else []
    finally:
        shutil.rmtree(directory)
    return Result(complaints, verdict="refused by stock" if stock_error else "loaded")


def make_trials(n_trials: int, seed: int) -> Iterator[Trial]:
    """Cases from seeds."""
    for number in range(seed * 100_000, seed * 100_000 + n_trials):
        case = draw(number)
        yield Trial(f"{case.layouts[0]} to {case.layouts[1]}", f"{number} {case}", partial(run, number))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    code = main(__doc__, make_trials, n_trials=2000)
    dist.destroy_process_group()
    sys.exit(code)
