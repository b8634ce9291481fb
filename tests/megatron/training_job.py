"""One rank of a training job of Megatron-LM's on CPU, by unmodified ``megatron.training``: a script for ``torchrun``.

Arguments, global variables, process groups, DDP, optimizer, training loop, ``load_checkpoint`` and the saves are
Megatron's own. A script gives it a model, batches and a loss. A batch follows from the number of its iteration, so that
a job that goes on from a checkpoint sees what a job without interruption would have seen.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["children"]


def children() -> set[int]:
    """The processes that this one has started."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found.update(map(int, path.read_text().split()))
    return found


def _model(pre_process: bool, post_process: bool, vp_stage: Any = None, config: Any = None, **more: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type=args.position_embedding_type,
        **more,
    )


def _optimizer_with_state(config: Any, model: list[Any], *arguments: Any, **more: Any) -> Any:
    """Adam of torch, unlike those for GPUs, has no state before its first step, and Megatron loads into one."""
    import torch
    from megatron.core.optimizer import get_megatron_optimizer

    optimizer = get_megatron_optimizer(config, model, *arguments, **more)
    for parameter in model[0].parameters():
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
        else:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


class _Training:
    """One rank of the job, from the point where Megatron's ``pretrain`` has set up model and optimizer."""

    def __init__(self) -> None:
        from megatron.core.enums import ModelType
        from megatron.training import get_args, training

        training.get_megatron_optimizer = _optimizer_with_state
        self.args = args = get_args()
        self.context: dict[str, Any] = {}
        self.set_up = partial(
            training.setup_model_and_optimizer,
            *(ModelType.encoder_or_decoder, _model),
            checkpointing_context=self.context,
        )
        self.model, self.optimizer, self.scheduler = self.set_up()
        if args.ckpt_format == "torch_dcp":
            # load_checkpoint of 0.19.2 calls state_dict(is_loading=True), which a chain does not take.
            [self.optimizer] = self.optimizer.chained_optimizers
        args.do_train, args.do_valid, args.do_test = True, False, False
        args.padded_vocab_size = args.vocab_size  # which a tokenizer would have set
        self.arguments = dict(vars(args))
        self.disk = contextlib.ExitStack()

    def do(self, step: str) -> dict[str, Any]:
        """What this rank notes of a step; of one that raised the class, the message and the ranks that failed."""
        verb, _, value = step.partition(":")
        self.noted: dict[str, Any] = {"losses": [], "trackers": [], "early": []}
        before = children()
        try:
            getattr(self, verb)(value)
        except Exception as error:
            failed_ranks = [failure.rank for failure in getattr(error, "rank_failures", ())]
            self.noted["error"] = [type(error).__name__, str(error), failed_ranks]
        finally:
            self.disk.close()
        processes = len(children() - before)
        return self.noted | {"digest": self.digest(), "tracker": self.tracker(), "processes": processes}

    def load(self, directory: str) -> None:
        import torch
        from megatron.training import checkpointing

        self.args.load, _, iteration = directory.partition("@")
        self.args.ckpt_step = int(iteration) if iteration else None
        self.args.iteration, _ = checkpointing.load_checkpoint(
            self.model, self.optimizer, self.scheduler, checkpointing_context=self.context
        )
        self.noted["iteration"] = self.args.iteration
        # Without Apex and Transformer Engine Megatron does not load the number of steps. There was one before all.
        for _, state in self.states_of_adam():
            state["step"] = torch.tensor(self.args.iteration + 1.0)

    def set(self, arguments: str) -> None:
        """Put the arguments of the command line in force again, but for these."""
        words = [argument.partition("=") for argument in arguments.split(",") if argument]
        vars(self.args).update(self.arguments | {name: value if equals else True for name, equals, value in words})

    def convert(self, directory: str) -> None:
        """Start as a job that loads a checkpoint, saves it in the other format, and ends."""
        self.args.load, _, iteration = directory.partition("@")
        self.args.ckpt_step = int(iteration)
        with contextlib.suppress(SystemExit):
            self.set_up()
            raise AssertionError("Megatron was to end the job")

    def train(self, events: str) -> None:
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.core.utils import get_model_config
        from megatron.training import get_timers, training

        happens = [event.split("=") for event in events.split(",") if event and self.args.rank == 1]
        self.events = {int(iteration): event for iteration, event in happens}
        self.iteration = self.args.iteration
        training.train(
            *(self.forward_step, self.model, self.optimizer, self.scheduler, RerunDataIterator(self.batches())),
            *(None, None, get_model_config(self.model[0]), self.context, None),
        )
        get_timers()("interval-time").stop()

    def batches(self) -> Iterator[Any]:
        import torch

        args = self.args
        while True:
            generator = torch.Generator().manual_seed(1000 * self.iteration + args.rank)
            yield torch.randint(args.vocab_size, (args.micro_batch_size, args.seq_length + 1), generator=generator)

    def forward_step(self, batches: Iterator[Any], model: Any) -> tuple[Any, Any]:
        import torch

        batch = next(batches)
        self.iteration += 1
        self.note_tracker()
        self.happen(self.events.get(self.iteration, ""))
        length = batch.shape[1] - 1
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        positions = torch.arange(length).expand(len(batch), length)

        def mean(losses: Any) -> tuple[Any, dict[str, Any]]:
            loss = losses.float().mean()
            self.noted["losses"].append(loss.item())
            return loss, {"lm loss": loss.detach().clone()}

        return model(batch[:, :-1].contiguous(), positions, mask, labels=batch[:, 1:].contiguous()), mean

    def happen(self, event: str) -> None:
        from tests.faults.disk import FaultDisk, Gate

        if event == "open":
            self.gate.opened.set()
        elif event:
            self.gate = Gate()
            fault = self.gate if event == "gate" else OSError(errno.ENOSPC, "")
            on = {f"write:iter_{self.iteration:07d}/*.distcp": fault}
            self.disk.enter_context(FaultDisk(self.args.save, on=on))

    def tracker(self) -> str | None:
        """The iteration that the file says which names the latest checkpoint."""
        path = Path(self.args.save, "latest_checkpointed_iteration.txt")
        return path.read_text() if path.exists() else None

    def note_tracker(self) -> None:
        """Before each iteration; and whether it names a checkpoint that is not committed."""
        named = self.tracker()
        self.noted["trackers"].append(named)
        if named is not None and not Path(self.args.save, f"iter_{int(named):07d}", ".metadata").exists():
            self.noted["early"].append(named)

    def states_of_adam(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Of each parameter in full precision."""
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            yield from optimizer.optimizer.state.items()

    def digest(self) -> str:
        """Of the weights and the optimizer's state on this rank, bit for bit."""
        import torch

        found = hashlib.sha256()
        values = [value for _, value in sorted(self.model[0].state_dict().items())]
        for value in [*values, *(each for key, state in self.states_of_adam() for each in (key, *state.values()))]:
            if isinstance(value, torch.Tensor):
                local = value.to_local() if hasattr(value, "to_local") else value
                found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--steps", nargs="*", default=[])
    parser.add_argument("--notes", type=Path)
    parser.add_argument("--node-drives", type=Path, help="each rank is a node of its own, which saves there")
    return parser


def _main() -> None:
    import torch

    from demo import megatron_cpu

    megatron_cpu.install()
    torch.set_num_threads(1)
    from megatron.training import arguments, global_vars, initialize

    initialize._compile_dependencies = lambda: None  # C++ of its data sets, which the source package lacks
    args = arguments.parse_args(_add_arguments)
    arguments.validate_args(args)
    args.high_priority_stream_groups = []  # an option of NCCL, which torch for CPU lacks
    args.save_tokenizer_assets = False  # it has no tokenizer
    global_vars.set_global_variables(args, build_tokenizer=False)
    notes, steps = args.notes, args.steps
    if args.node_drives is not None:
        from tests.harness.hosts import become_node

        Path(args.save).mkdir(exist_ok=True)
        become_node(f"host-{args.rank}", args.save, args.node_drives / str(args.rank))
    del args.notes, args.node_drives  # the arguments are part of the checkpoint
    initialize.initialize_megatron(
        allow_no_cuda=True, store=torch.distributed.FileStore(str(notes / "store"), args.world_size)
    )
    training = _Training()
    (notes / f"rank{args.rank}.json").write_text(json.dumps([training.do(step) for step in steps]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main()
