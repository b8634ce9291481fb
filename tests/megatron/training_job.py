"""A training script of Megatron-LM's, run by unmodified ``megatron.training`` on CPU ranks, and what starts it.

Holds the steps between Megatron's functions: a model, gradients, when to save. Arguments, global variables, process
groups, DDP, optimizer, ``load_checkpoint`` and ``save_checkpoint`` are Megatron's own. Run as a script it is one rank;
:func:`run_job` is for tests.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Job", "children", "run_job"]

_ROOT = Path(__file__).parents[2]
_RANKS = 2
_MODEL = """
--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8
--position-embedding-type rope --no-rope-fusion --swiglu --vocab-size 64 --untie-embeddings-and-output-weights
--transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-persist-layer-norm --no-bias-dropout-fusion --distributed-backend gloo --bf16 --micro-batch-size 1
--train-iters 100 --lr 0.01 --save-interval 10
"""


@dataclass(frozen=True)
class Job:
    """What became of a job.

    Attributes:
        ranks: for each rank what it noted, step by step.
        output: of all ranks, log and standard error.
    """

    ranks: list[list[dict[str, Any]]]
    output: str

    def of_step(self, place: int, key: str) -> list[Any]:
        """What the ranks noted under ``key`` at one step."""
        return [rank[place].get(key) for rank in self.ranks]


def run_job(directory: Path, *arguments: str | Path, steps: str) -> Job:
    """Run two ranks of a training job until they have done all their steps.

    Args:
        directory: an empty one, for what the ranks note.
        arguments: of Megatron-LM.
        steps: ``save:N`` (train a step, save it as iteration N), ``fault:N`` (the same, while no file of rank 1 may
            grow beyond a few bytes),
            ``finalize`` (asynchronous saves; a ``fault`` lasts until then), ``load:DIRECTORY``, ``load:DIRECTORY@N``,
            ``loop`` (Megatron's own training loop, until ``--train-iters``), ``loop:5=gate,8=open`` (with events of
            :class:`TrainingLoop` on rank 1).

    Raises:
        AssertionError: a rank failed, or was still running after 400 seconds; all have ended then.
    """
    directory.mkdir(parents=True)
    command = [sys.executable, __file__, *_MODEL.split(), *map(str, arguments)]
    command += ["--notes", str(directory), "--steps", *steps.split()]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ROBUST_DCP")}
    variables.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    variables["PYTHONPATH"] = os.pathsep.join([str(_ROOT), variables.get("PYTHONPATH", "")]).strip(os.pathsep)
    variables.update(WORLD_SIZE=str(_RANKS), OMP_NUM_THREADS="1")
    with (directory / "output").open("wb") as output:
        processes = [
            subprocess.Popen(
                command,
                env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(_RANKS)
        ]
        deadline = time.monotonic() + 400
        try:
            codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            codes = []
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what Megatron has started for it
                process.wait()
    text = (directory / "output").read_text(errors="replace")
    assert codes == [0] * _RANKS, f"exit codes {codes or 'missing: not done in time'}\n{text}"
    return Job([json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(_RANKS)], text)


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--steps", nargs="*", default=[])
    parser.add_argument("--notes", type=Path)
    return parser


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


@contextlib.contextmanager
def _no_room_for_files() -> Iterator[None]:
    """As on a file system that is full: a file that this process writes cannot grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def children() -> set[int]:
    """The processes that this one has started."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found.update(map(int, path.read_text().split()))
    return found


def _told(error: Exception) -> list[Any]:
    """Its class, its message, and the ranks that failed."""
    return [type(error).__name__, str(error), [failure.rank for failure in getattr(error, "rank_failures", ())]]


class _Training:
    """One rank of the job, from the point where Megatron's ``pretrain`` has set up model and optimizer."""

    def __init__(self) -> None:
        from megatron.core.enums import ModelType
        from megatron.training import get_args, training

        self.args = get_args()
        self.context: dict[str, Any] = {}
        self.model, self.optimizer, self.scheduler = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder, _model, checkpointing_context=self.context
        )
        if self.args.ckpt_format == "torch_dcp":
            # load_checkpoint of 0.19.2 calls state_dict(is_loading=True), which a chain does not take.
            [self.optimizer] = self.optimizer.chained_optimizers
        # Adam of torch, unlike those for GPUs, has no state before its first step, and Megatron loads into one.
        self.train(0)
        self.notes: list[dict[str, Any]] = []
        self.faults = contextlib.ExitStack()

    def do(self, step: str) -> None:
        verb, _, value = step.partition(":")
        if verb == "load":
            self.notes.append(self.load(value))
        elif verb == "finalize":
            self.notes.append(self.finalize())
        elif verb == "loop":
            self.notes.append(self.loop(value))
        else:
            self.train(int(value))
            if verb == "fault" and self.args.rank == 1:
                self.faults.enter_context(_no_room_for_files())
            self.notes.append(self.save(int(value)))
            if not self.args.async_save:
                self.faults.close()

    def train(self, iteration: int) -> None:
        """One step of the optimizer, with gradients that are the same on all ranks."""
        import torch
        from torch.distributed.tensor import distribute_tensor

        generator = torch.Generator().manual_seed(iteration)
        for parameter in self.model[0].parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            if not hasattr(parameter, "main_grad"):
                whole = gradient.to(parameter.dtype)
                parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            else:
                parameter.main_grad.copy_(gradient)
        self.optimizer.step()
        if iteration > 0:  # a scheduler that has stepped adds to that what it loads
            self.scheduler.step(increment=self.args.global_batch_size)

    def save(self, iteration: int) -> dict[str, Any]:
        from megatron.training import training

        noted: dict[str, Any] = {"digest": self.digest()}
        try:
            training.save_checkpoint_and_time(iteration, self.model, self.optimizer, self.scheduler, 0, self.context)
        except Exception as error:
            noted["error"] = _told(error)
        return noted | {"plan": self.plan(), "tracker": self.tracker(), "processes": len(children())}

    def finalize(self) -> dict[str, Any]:
        from megatron.training import training

        noted: dict[str, Any] = {}
        try:
            training.maybe_finalize_async_save(blocking=True)
        except Exception as error:
            noted["error"] = _told(error)
        self.faults.close()
        return noted | {"plan": self.plan(), "tracker": self.tracker()}

    def loop(self, events: str) -> dict[str, Any]:
        from tests.megatron.training_loop import TrainingLoop

        noted: dict[str, Any] = {}
        happens = [event.split("=") for event in events.split(",") if event and self.args.rank == 1]
        loop = TrainingLoop(self.args, self.tracker)
        before = children()
        try:
            loop.run(
                *(self.model, self.optimizer, self.scheduler, self.context),
                {int(iteration): event for iteration, event in happens},
            )
        except Exception as error:
            noted["error"] = _told(error)
        noted |= {"losses": loop.losses, "trackers": loop.trackers, "early": loop.early}
        return noted | {"digest": self.digest(), "tracker": self.tracker(), "processes": len(children() - before)}

    def plan(self) -> str | None:
        """Of the last save that is over."""
        strategy = self.context.get("save_strategy")
        report = getattr(getattr(strategy, "base_strategy", strategy), "last_report", None)
        return None if report is None else report.plan

    def tracker(self) -> str | None:
        path = Path(self.args.save, "latest_checkpointed_iteration.txt")
        return path.read_text() if path.exists() else None

    def load(self, directory: str) -> dict[str, Any]:
        from megatron.training import checkpointing

        self.args.load, _, step = directory.partition("@")
        self.args.ckpt_step = int(step) if step else None
        try:
            iteration, _ = checkpointing.load_checkpoint(
                self.model, self.optimizer, self.scheduler, checkpointing_context=self.context
            )
        except Exception as error:
            return {"error": _told(error)}
        self.args.iteration = iteration
        self.set_steps(iteration + 1)  # and the one before all others
        return {"iteration": iteration, "digest": self.digest()}

    def set_steps(self, count: int) -> None:
        """Tell Adam how many steps it has taken. Without Apex and Transformer Engine Megatron does not load that."""
        import torch

        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for state in optimizer.optimizer.state.values():
                state["step"] = torch.tensor(float(count))

    def digest(self) -> str:
        """Of the weights and the optimizer's state on this rank, bit for bit."""
        import torch

        tensors = [value for _, value in sorted(self.model[0].state_dict().items()) if isinstance(value, torch.Tensor)]
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.optimizer.state.get(parameter, {})
                    tensors += [parameter, *(state[name] for name in ("exp_avg", "exp_avg_sq") if name in state)]
        found = hashlib.sha256()
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def _main() -> None:
    import torch

    from tests.megatron.without_cuda import redirect_cuda

    redirect_cuda()
    torch.set_num_threads(1)
    from megatron.training import arguments, global_vars, initialize

    initialize._compile_dependencies = lambda: None  # C++ of its data sets, which the source package lacks
    args = arguments.parse_args(_add_arguments)
    arguments.validate_args(args)
    args.high_priority_stream_groups = []  # an option of NCCL, which torch for CPU lacks
    global_vars.set_global_variables(args, build_tokenizer=False)
    notes, steps = args.notes, args.steps
    del args.notes  # the arguments are part of the checkpoint
    initialize.initialize_megatron(
        allow_no_cuda=True, store=torch.distributed.FileStore(str(notes / "store"), args.world_size)
    )
    training = _Training()
    for step in steps:
        training.do(step)
    (notes / f"rank{args.rank}.json").write_text(json.dumps(training.notes))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main()
