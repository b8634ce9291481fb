"""``prove``: whether what is live is what the checkpoint holds. It is a load whose targets are compared, not filled.

Each rank compares what it holds. What the ranks have found is merged on its way through the tree, so one exchange tells
all of them the same. This module owns the report, the words for it, and the proof before the first step of an
optimizer.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from robust_dcp.api import CheckpointId, open_load
from robust_dcp.errors import RobustCheckpointError, entry_point, ranks_in_words
from robust_dcp.names import bare_names, fits
from robust_dcp.plan.keys import AskedKeys, asked_by_any, asked_keys, unread_keys
from robust_dcp.plan.load_planner import RobustLoadPlanner, robust_load_planner
from robust_dcp.report import listed, sizes_in_words
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.comparing import Comparison

_SHOWN: Final = 5


class Difference(NamedTuple):
    """How a key differs from the checkpoint.

    Attributes:
        elements: how many elements of its tensor differ, on all ranks together; all of them if dtype or size differ. An
            object is one element.
        first: the place of the first one in the whole tensor; ``()`` for an object.
        ranks: where it differs.
    """

    elements: int
    first: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ProofReport:
    """What :func:`prove` has found, the same on all ranks. It prints as a list of groups, with likely causes.

    Attributes:
        checkpoint_id: the checkpoint that the live state was compared with.
        equal: whether nothing differs, is missing or was left out.
        differing: the keys whose values differ.
        missing: keys that are live on some rank and are not in the checkpoint.
        unread: keys of the checkpoint that no rank has compared with anything.
        world_size: how many ranks have compared.
        nbytes_compared: on all ranks together.
        seconds: how long the slowest rank took.
        words: for keys that differ as a whole, what is here and what is in the checkpoint.
    """

    checkpoint_id: str
    differing: Mapping[str, Difference] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    world_size: int = 1
    nbytes_compared: int = 0
    seconds: float = 0.0
    words: Mapping[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return not (self.differing or self.missing or self.unread)

    def raise_if_differs(self) -> None:
        """Raise the report as an error, unless all is equal. All ranks raise the same.

        Raises:
            RobustCheckpointError: something differs. Its message is this report.
        """
        if not self.equal:
            raise RobustCheckpointError(str(self))

    def __str__(self) -> str:
        done = f"{sizes_in_words(self.nbytes_compared)} compared in {self.seconds:.3f} s"
        if self.equal:
            return f"the live state is that of {self.checkpoint_id}: {done}"
        counts = (
            (len(self.differing), "different"),
            (len(self.missing), "not in the checkpoint"),
            (len(self.unread), "of the checkpoint not live"),
        )
        shown = ", ".join(f"{count} key{'s' * (count > 1)} {what}" for count, what in counts if count)
        lines = [f"the live state is not that of {self.checkpoint_id}: {shown} ({done})"]
        for what, keys in (
            ("differ", self.differing),
            ("not in the checkpoint", self.missing),
            ("not live", self.unread),
        ):
            for group, members in _groups(keys):
                lines.append(f"  {what}: {self._group_in_words(group, members)}")
        return "\n".join([*lines, *(f"  likely: {cause}" for cause in self._causes())])

    def _group_in_words(self, group: str, keys: Sequence[str]) -> str:
        first = keys[0]
        name = repr(first) if len(keys) == 1 else f"{len(keys)} keys of {group!r}, such as {first!r}"
        if first not in self.differing:
            return name
        elements, place, ranks = self.differing[first]
        where = self.words.get(first) or f"{elements} elements, the first at {list(place)}"
        return f"{name} ({where}; on {ranks_in_words(ranks)})"

    def _causes(self) -> Iterator[str]:
        """What has probably happened, for what is known to happen."""
        states = [key for key in (*self.unread, *self.missing) if _STATE in key]
        leaves = sorted({key.rpartition(".")[2] for key in states})
        if states and set(states) & set(self.unread):
            yield f"{listed(leaves)} of the checkpoint are in no optimizer: it had no state when it was compared"
        elif states:
            yield f"{listed(leaves)} are live and not in the checkpoint: the optimizer had no state when it was saved"
        for group in sorted({_top(key) for key in self.unread if _STATE not in key}):
            if not any(_top(key) == group for key in self.differing):
                yield f"nobody has loaded {group!r}, or it was not passed to prove"
        if any(_OF_THE_LOOP.search(key) for key in self.differing):
            yield "a seed, a data loader or a scheduler was set or moved on after the load"
        whole = [key for key, each in self.words.items() if "dtype" in each or " here and torch." in each]
        if whole:
            yield f"{listed(map(repr, whole), _SHOWN)} were converted to another dtype"
        of_some = {each.ranks for each in self.differing.values()}
        if self.world_size > 1 and len(of_some) == 1 and len(next(iter(of_some))) == 1:
            yield f"only {ranks_in_words(next(iter(of_some)))} differs: its copy was changed, or its memory is bad"


_STATE: Final = ".state."
_GROUPS: Final = ".param_groups."
_OF_THE_LOOP: Final = re.compile("rng|random|seed|loader|sched|epoch", re.IGNORECASE)


def _top(key: str) -> str:
    return key.partition(".")[0]


def _groups(keys: Sequence[str] | Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Keys by what they are part of: the top key, and for the states of optimizers the name of the state."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key in sorted(keys):
        groups[f"{_top(key)}{_STATE}*.{key.rpartition('.')[2]}" if _STATE in key else _top(key)].append(key)
    yield from groups.items()


class _Findings(msgspec.Struct, frozen=True):
    """What some ranks have found.

    Attributes:
        differing: by key elements, first place, and a bit for each rank, little-endian.
        asked: ``None`` for all keys of the checkpoint.
    """

    differing: dict[str, tuple[int, tuple[int, ...], bytes]]
    words: dict[str, str]
    missing: tuple[str, ...]
    asked: AskedKeys | None
    nbytes: int
    seconds: float


def _merged(all_findings: list[_Findings]) -> _Findings:
    differing: dict[str, tuple[int, tuple[int, ...], bytes]] = {}
    words: dict[str, str] = {}
    for each in all_findings:
        words = {**each.words, **words}
        for key, (elements, first, ranks) in each.differing.items():
            before, earlier, others = differing.get(key, (0, first, b""))
            both = int.from_bytes(ranks, "little") | int.from_bytes(others, "little")
            together = both.to_bytes(max(len(ranks), len(others)), "little")
            differing[key] = before + elements, min(first, earlier), together
    return _Findings(
        differing,
        words,
        tuple(sorted({key for each in all_findings for key in each.missing})),
        asked_by_any([each.asked for each in all_findings]),
        sum(each.nbytes for each in all_findings),
        max(each.seconds for each in all_findings),
    )


@entry_point
def prove(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: RobustReader | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = 300.0,
    deadline_seconds: float | None = None,
) -> ProofReport:
    """Compare what is live with a checkpoint, on all ranks of a group. Nothing is changed.

    Call it after a load, with what training goes on with: the modules, optimizers and ``Stateful`` values themselves.
    Where a shard is cut as it was saved, only checksums are compared and no data is read. Otherwise pieces are read
    into one block and compared.

    Args:
        state_dict: as for :func:`save`. Numbers, also in tensors, are equal if their bits are; dicts in any order.
        checkpoint_id: the checkpoint's directory, of robust_dcp or of stock.
        storage_reader: a :class:`RobustReader`, to set its options.
        process_group: the ranks that compare together; ``None`` for all.
        no_dist, timeout_seconds, deadline_seconds: as for :func:`load`.

    Raises:
        TypeError: the reader is of another library.
        RobustCheckpointError: or one of its subclasses: the checkpoint cannot be read, or a rank has failed. A
            difference is no error; :meth:`ProofReport.raise_if_differs` makes it one.

    Example:
        >>> import torch, robust_dcp, tempfile
        >>> model = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = robust_dcp.save({"model": model}, checkpoint_id=path)
        ...     torch.nn.init.zeros_(model.bias)
        ...     report = robust_dcp.prove({"model": model}, checkpoint_id=path)
        Parameter containing:
        tensor([0., 0.], requires_grad=True)
        >>> report.equal, dict(report.differing)
        (False, {'model.bias': Difference(elements=2, first=(0,), ranks=(0,))})
    """
    if storage_reader is not None and not isinstance(storage_reader, RobustReader):
        raise TypeError(f"prove reads by RobustReader, and {type(storage_reader).__name__} would fill what is live")
    return compare(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        process_group=process_group,
        no_dist=no_dist,
        timeout_seconds=timeout_seconds,
        deadline_seconds=deadline_seconds,
    )


def compare(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    allow_missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
    counts: Callable[[str], bool] = lambda key: True,
    also: Callable[[Comparison], None] = lambda comparison: None,
    **options: Any,
) -> ProofReport:
    """Compare what a load has filled with its checkpoint. What the load was allowed to leave out is no difference.

    Args:
        checkpoint_id, storage_reader, planner, allow_missing, ignore: those of the load.
        counts: whether a key matters.
        also: compares more, on each rank.
        options: the other arguments of :func:`prove`.
    """
    given = robust_load_planner(planner or RobustLoadPlanner(allow_missing=allow_missing, ignore=ignore))
    if not isinstance(given, RobustLoadPlanner):  # of a class of the caller's: what it converts is meant
        given = RobustLoadPlanner(
            getattr(given, "flatten_state_dict", True),
            getattr(given, "flatten_sharded_tensors", True),
            allow_partial_load=getattr(given, "allow_partial_load", False),
            on_dtype_mismatch="cast",
        )
    comparing = RobustLoadPlanner(
        given.flatten_state_dict,
        given.flatten_sharded_tensors,
        allow_partial_load=True,
        on_dtype_mismatch=given.on_dtype_mismatch,
        trusted=given.trusted,
        allow_missing=["*"] if given.allow_partial_load else given.allow_missing,
        ignore=given.ignore,
    )
    comparing.comparison = Comparison()
    reader = storage_reader if isinstance(storage_reader, RobustReader) else None
    loading = open_load("prove", state_dict, checkpoint_id, reader, comparing, **{"process_group": None, **options})
    channel = loading.channel

    def findings_here() -> _Findings:
        comparison = comparing.comparison or Comparison()
        if loading.shared is not None:
            loading.shared.load_objects(comparing, loading.checkpoint)
        also(comparison)
        bits = (1 << channel.rank).to_bytes(-(-channel.size // 8), "little")
        return _Findings(
            {key: (*each, bits) for key, each in comparison.differing.items() if counts(key)},
            {key: words for key, words in comparison.words.items() if counts(key)},
            tuple(filter(counts, comparing.missing_keys)),
            None if comparing.metadata is None else asked_keys(comparing.metadata, comparing.state_dict, ()),
            comparison.nbytes,
            time.perf_counter() - loading.clock.started_seconds,
        )

    with channel.together(), loading.keeping():
        loading.plan_and_read()
        findings = channel.reduce(f"{channel.operation}: compare", findings_here, _Findings, _merged)
    unread = [] if comparing.metadata is None else unread_keys(comparing.metadata, findings.asked)
    ranks = range(channel.size)
    return ProofReport(
        loading.checkpoint,
        {
            key: Difference(elements, first, tuple(rank for rank in ranks if bits[rank // 8] >> rank % 8 & 1))
            for key, (elements, first, bits) in sorted(findings.differing.items())
        },
        tuple(key for key in findings.missing if not fits(key, comparing.allow_missing)),
        tuple(key for key in unread if counts(key) and not fits(key, comparing.ignore)),
        channel.size,
        findings.nbytes,
        findings.seconds,
        findings.words,
    )


def before_first_step(state_dict: dict[str, Any], planner: LoadPlanner | None) -> Callable[..., None]:
    """A function that makes the first optimizer of ``state_dict`` that steps prove before that, and raise if something
    differs. It takes the other arguments of :func:`compare`.

    Until then the forward pass has changed buffers, random numbers and the data loader, and the loop may have set the
    learning rate. So parameters, the rest of optimizers, and their schedulers are compared.

    Raises:
        ValueError: the state dict has no optimizer, but perhaps its state dict, which nobody steps; or the planner does
            not flatten it, so what has changed by then has no names.
    """
    if not getattr(planner, "flatten_state_dict", True):
        raise ValueError('prove="first step" goes by names, and with flatten_state_dict=False there are none')
    members = {key: value if isinstance(value, list | tuple) else [value] for key, value in state_dict.items()}
    optimizers = [each for values in members.values() for each in values if isinstance(each, Optimizer)]
    if not optimizers:
        raise ValueError('prove="first step" needs the optimizer itself in the state dict, not its state_dict()')
    kinds = (nn.Module, Optimizer, LRScheduler)
    kept = {key: value for key, value in state_dict.items() if all(isinstance(each, kinds) for each in members[key])}
    prefixes = tuple(f"{key}." for key in kept)

    def arm(**options: Any) -> None:
        hooks: list[Any] = []

        def counts(key: str) -> bool:
            return key.startswith(prefixes) and key not in buffers and not (_GROUPS in key and key.endswith(".lr"))

        def before_step(*_: Any) -> None:
            for hook in hooks:
                hook.remove()
            compare(kept, counts=counts, **options).raise_if_differs()

        modules = [(key, each) for key in kept for each in members[key] if isinstance(each, nn.Module)]
        buffers = {
            f"{key}.{name}"
            for key, module in modules
            for name in bare_names(module, dict(module.named_buffers())).values()
        }
        hooks += [each.register_step_pre_hook(before_step) for each in optimizers]

    return arm
