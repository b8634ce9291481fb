"""The words of ``robust-dcp``: its commands with their arguments, help and examples. It imports no command."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from robust_dcp.cli.output import CommandFailed
from robust_dcp.storage.files.paths import is_url
from robust_dcp.version import __version__

__all__ = ["COMMANDS", "WrongWords", "nbytes_in", "parse"]

_WIDTH: Final = 100
_FILE_URL: Final = re.compile(r"file://(?:localhost)?(?=/)", re.IGNORECASE)
_SIZE: Final = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[kKMGT]?)(?P<binary>i?)[bB]?(?:/s)?")
_POWERS: Final = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}

Argument = tuple[tuple[str, ...], dict[str, Any]]
"""What ``ArgumentParser.add_argument`` takes."""


class WrongWords(Exception):
    """The command line makes no sense. ``usage`` says how it is meant."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


class Command(NamedTuple):
    """A command: the first line of its help, the rest of it, examples, and what it takes."""

    summary: str
    more: str
    examples: tuple[str, ...]
    arguments: tuple[Argument, ...]


def place(text: str) -> str:
    """A path or a URL that a command was given. A path may be written as ``file:///path``."""
    return _FILE_URL.sub("", text.strip(), count=1) if is_url(text) else text


def local_path(text: str) -> str:
    """The path that a command was given, which may be written as ``file:///path``.

    Raises:
        CommandFailed: it is a place in a store.
    """
    path = place(text)
    if is_url(path):
        raise CommandFailed(
            f"{text} is a URL, and this command takes directories of mounted file systems: copy the checkpoint to one "
            "with robust-dcp copy, or from one"
        )
    return path


def nbytes_in(text: str) -> float:
    """``"500MB"`` -> 500,000,000; ``"1.5GiB"`` -> 1,610,612,736.

    Raises:
        CommandFailed: it is no size.
    """
    size = _SIZE.fullmatch(text.strip())
    number = 0.0 if size is None else float(size["number"])
    if size is None or number <= 0:
        raise CommandFailed(f"{text!r} is no size: write a number and a unit, for example 500MB or 1GiB")
    return number * float((1024 if size["binary"] else 1000) ** _POWERS[size["unit"]])


def number_in(kind: type[int] | type[float], least: float, most: float | None = None) -> Callable[[str], float]:
    """A number within bounds."""

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value or (most is not None and value > most):
            bounds = f"at least {least:g}" if most is None else f"between {least:g} and {most:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {bounds}")
        return value

    return number


def pair(text: str) -> tuple[str, str]:
    """``"model.*=*"`` -> ``("model.*", "*")``."""
    left, _, right = text.partition("=")
    if not left or not right:
        raise argparse.ArgumentTypeError(f"{text}: write two sides with = between them, for example 'model.*=*'")
    return left, right


def cast(text: str) -> tuple[str, str]:
    """``"bfloat16"`` -> ``("*", "bfloat16")``."""
    return pair(text) if "=" in text else ("*", text)


def store_option(text: str) -> tuple[str, Any]:
    """``"anon=true"`` -> ``("anon", True)``. A value that is no JSON is a string."""
    key, is_pair, value = text.partition("=")
    if not key or not is_pair:
        raise argparse.ArgumentTypeError(f"{text!r} is no option: write key=value, for example anon=true")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _argument(*names: str, **how: Any) -> Argument:
    return names, how


def _many(name: str, kind: Callable[[str], Any], help: str) -> Argument:
    return (name,), {"action": "append", "default": [], "type": kind, "help": help}


def _flag(*names: str, help: str) -> Argument:
    return names, {"action": "store_true", "help": help}


_JSON: Final = _flag("--json", help="Print one JSON object, sizes in bytes.")
_CHECKPOINT: Final = _argument("path", type=place, help="The checkpoint's directory, or its URL.")
_ROOT: Final = _argument("root", type=local_path, help="The directory that holds the checkpoints.")
_FORMS: Final = ("dcp", "safetensors", "torch")

COMMANDS: Final = {
    "inspect": Command(
        "Show what a checkpoint holds: names, dtypes, shapes, chunks, and where they lie.",
        "It reads .metadata only, and the sizes of the files.",
        (
            "robust-dcp inspect checkpoints/step_1000",
            "robust-dcp inspect checkpoints/step_1000 'model.layers.0.*' --table",
            "robust-dcp inspect checkpoints/step_1000 --files",
            "robust-dcp inspect checkpoints/step_1000 --json | jq '.items[].name'",
        ),
        (
            _CHECKPOINT,
            _argument("pattern", nargs="*", help="Show only items with such names, for example 'model.*.weight'."),
            _flag("--table", help="One line for each item instead of a tree."),
            _flag("--files", help="The data files instead of the items."),
            _flag("--ranks", help="What each rank wrote."),
            _flag("--dtype", help="How many bytes there are of each dtype."),
            _argument("--depth", type=number_in(int, 1), default=3, help="How many levels of the tree are shown."),
        ),
    ),
    "verify": Command(
        "Find out whether a checkpoint is whole: structure, sizes, identity, and the checksums of all data.",
        "Of a directory that holds the checkpoints of a run it verifies each. Exit code 1 means that something is "
        "broken. Data that was written without checksums is counted as not "
        "verified.",
        (
            "robust-dcp verify checkpoints/step_1000",
            "robust-dcp verify checkpoints",
            "robust-dcp verify s3://bucket/run_7/step_1000 --fast",
            "robust-dcp verify checkpoints/step_1000 --json | jq '.problems[].item'",
        ),
        (
            _argument("path", type=place, help="A checkpoint, its URL, or a directory that holds those of a run."),
            _argument("-j", "--jobs", type=number_in(int, 1, 256), help="How many threads read. Default: 4 to 16."),
            _flag("--fast", help="Do not read data: structure, sizes, marks and index."),
        ),
    ),
    "diff": Command(
        "Show how two checkpoints differ: in their structure, and with --values in what they hold.",
        "They may be of any kind and sharded in any way. The exit code is 0 if they are equal, and 1 if they differ.",
        (
            "robust-dcp diff checkpoints/step_1000 checkpoints/step_2000",
            "robust-dcp diff ours stock --values",
            "robust-dcp diff before after 'model.layers.0.*' --values --tolerance 1e-6",
        ),
        (
            _argument("first", type=local_path, help="A checkpoint's directory."),
            _argument("second", type=local_path, help="Another one's."),
            _argument("pattern", nargs="*", help="Compare only items with such names, for example 'model.*'."),
            _flag("--values", help="Compare the values, too."),
            _argument("--tolerance", type=number_in(float, 0), default=0.0, help="Smaller differences count as equal."),
            _flag("--chunks", help="Compare also how tensors are cut into chunks."),
        ),
    ),
    "convert": Command(
        "Make a checkpoint, the safetensors files of a Hugging Face model, or one file of torch.save.",
        "The target appears when it is whole. If the command is cut off, start it again.",
        (
            "robust-dcp convert checkpoints/step_1000 model --to safetensors --select 'model.*' --rename 'model.*=*'",
            "robust-dcp convert checkpoints/step_1000 step_1000.pt --to torch",
            "robust-dcp convert step_1000.pt checkpoints/step_1000 --to dcp --dtype bfloat16 "
            "--dtype 'lm_head.*=float32'",
        ),
        (
            _argument("source", type=local_path, help="A checkpoint, or a file of torch.save."),
            _argument("target", type=local_path, help="A directory; with --to torch a file."),
            _argument("--to", choices=_FORMS, required=True, help="What to make."),
            _many("--select", str, "Only items with such names."),
            _many("--exclude", str, "No items with such names."),
            _many("--rename", pair, "New names: 'model.*=*'. What * stood for is put in. The first that fits counts."),
            _many(
                "--dtype", cast, "Cast floating tensors: bfloat16, or 'lm_head.*=float32'. The last that fits counts."
            ),
            _argument(
                "--max-shard-size", type=nbytes_in, default="5GiB", help="safetensors: the most bytes in a file."
            ),
            _argument("--config", type=local_path, help="safetensors: copy config.json and the tokenizer from here."),
            _argument("--layout", default="torch", help="dcp: of the data files, torch (default) or safetensors."),
            _argument("--files", type=number_in(int, 1), default=1, help="dcp: how many data files."),
            _flag("--flat", help="torch: one dict by names instead of a nested one."),
            _flag("--force", help="Replace a target that exists."),
        ),
    ),
    "copy": Command(
        "Copy a checkpoint, verify each file at the target, and commit the copy.",
        "A copy that was cut off goes on if you start it again: what has arrived is not sent once more.",
        (
            "robust-dcp copy /nvme/run_7/step_1000 s3://bucket/run_7/step_1000",
            "robust-dcp copy s3://bucket/run_7/step_1000 /nvme/run_7/step_1000 --limit 500MB",
            "robust-dcp copy step_1000 s3://bucket/step_1000 --target-option endpoint_url=http://127.0.0.1:9000",
        ),
        (
            _argument("source", help="A checkpoint's directory or URL."),
            _argument("target", help="Where to: a directory or a URL of fsspec."),
            _argument("--limit", type=nbytes_in, help="The most bytes to send in a second, for example 500MB."),
            _argument("--threads", type=number_in(int, 1), default=8, help="How many files are sent at once."),
            _argument("--retries", type=number_in(int, 0), default=5, help="How often a failed call is made again."),
            _flag("--read-back", help="Read each file back instead of taking the store's checksum."),
            _many("--source-option", store_option, "What fsspec passes to the source's store: key=value."),
            _many("--target-option", store_option, "What fsspec passes to the target's store: key=value."),
        ),
    ),
    "report": Command(
        "Write a page that shows how saves went: phases, ranks and nodes, history, changes, sizes.",
        "It reads .robust_dcp.report.json, which each save leaves. The page is one file and needs no network.",
        (
            "robust-dcp report checkpoints",
            "robust-dcp report checkpoints/step_1000 --output step_1000.html",
            "robust-dcp report checkpoints --json | jq '.reports[].seconds'",
        ),
        (
            _argument("path", type=local_path, help="A checkpoint, or a directory that holds those of a run."),
            _argument("-o", "--output", default="robust_dcp_report.html", help="The page to write."),
        ),
    ),
    "ls": Command(
        "List the checkpoints below a directory with step, size, state and age.",
        "It finds directories like step_1000, iter_0001000, global_step1000 and checkpoint-1000. Those whose names "
        "begin alike are a series. Series follow each other, and the newest line of each is its last.",
        ("robust-dcp ls checkpoints", "robust-dcp ls checkpoints --json | jq '.checkpoints[].step'"),
        (_ROOT,),
    ),
    "prune": Command(
        "Remove the checkpoints that none of the given rules keeps.",
        "Checkpoints whose names begin alike are a series. If there are several, --name says which one. The latest "
        "checkpoint of the series and the one with the highest step always stay, and so does one that is being loaded "
        "or saved, that robust_dcp has not saved, or whose copy in durable storage has not arrived. In a terminal it "
        "asks first. Elsewhere it removes only with --yes, and otherwise shows what it would remove, with exit code 2. "
        "What crashed saves and cut off removals have left goes as well.",
        (
            "robust-dcp prune checkpoints --keep-last 3 --dry-run",
            "robust-dcp prune checkpoints --keep-last 3 --keep-every 10000 --yes",
            "robust-dcp prune checkpoints --keep-last 1 --keep-best accuracy --largest",
            "robust-dcp prune checkpoints --keep-last 1 --name 'critic_{step}'",
        ),
        (
            _ROOT,
            _argument("--keep-last", type=number_in(int, 1), help="Keep the ones with the highest steps, so many."),
            _argument("--keep-every", type=number_in(int, 1), help="Keep steps that are multiples of this."),
            _argument("--keep-best", help="Keep the one with the smallest value of this metric."),
            _flag("--largest", help="The largest value of the metric is best."),
            _argument("--name", help="Which series, as CheckpointManager's name: critic_{step}."),
            _flag("-n", "--dry-run", help="Only show what would be removed."),
            _flag("-y", "--yes", help="Do not ask."),
        ),
    ),
    "bench": Command(
        "Measure how fast a device writes and reads, direct and buffered, and say which options suit it.",
        "Its files have no names, so nothing stays behind, also after Ctrl-C. It uses at most a quarter of the free "
        "space, and 512 MiB at a time. The device should have nothing else to do meanwhile.",
        ("robust-dcp bench checkpoints", "robust-dcp bench /mnt/nvme --seconds 20 --json"),
        (
            _argument("path", type=local_path, help="A directory on the device. It need not exist."),
            _argument("--seconds", type=number_in(float, 0.1, 600), default=8.0, help="About how long to measure."),
        ),
    ),
    "doctor": Command(
        "Look at versions, network, limits and the file system, and say what to do about each finding.",
        "With PATH it makes a few small files there, and removes them. Exit code 1 means that there is a problem.",
        (
            "robust-dcp doctor",
            "robust-dcp doctor /mnt/checkpoints",
            "robust-dcp doctor /mnt/checkpoints --json | jq '.findings[] | select(.state == \"problem\")'",
        ),
        (_argument("path", nargs="?", type=local_path, help="The directory that checkpoints go to."),),
    ),
}


class _Parser(argparse.ArgumentParser):
    def __init__(self, name: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=name,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=_WIDTH, max_help_position=34),
        )

    def error(self, message: str) -> NoReturn:
        raise WrongWords(message, self.format_usage())


def parse(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The command and its arguments. ``--help``, ``--version`` and completion print, and end the process with 0.

    Raises:
        WrongWords: the words make no sense.
        CommandFailed: a path or a size is none.
    """
    name = words[0] if words else "--help"
    if name in COMMANDS:
        return name, vars(_parser_of(name).parse_intermixed_args(words[1:]))
    lines = "\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items())
    parser = _Parser(
        "robust-dcp",
        "Look at, check, compare, convert and move PyTorch distributed checkpoints: those of robust_dcp, of stock\n"
        "torch.distributed.checkpoint and of Megatron-Core. Nothing in a checkpoint is executed.\n\ncommands:\n"
        + lines,
        "Exit codes: 0 all is well, 1 a problem was found, 2 the command could not do its work.",
    )
    parser.add_argument("--version", action="version", version=f"robust-dcp {__version__}")
    parser.add_argument("--install-completion", action=_Completion, help="Complete commands and options in this shell.")
    parser.add_argument("--show-completion", action=_Completion, help="Print the script that does so.")
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="robust-dcp COMMAND --help says more.")
    parser.parse_args(words or ["--help"])
    raise WrongWords(f"{name} comes after the command", parser.format_usage())


def _parser_of(name: str) -> _Parser:
    command = COMMANDS[name]
    examples = "\n".join(["Examples:", *(f"  {each}" for each in command.examples)])
    parser = _Parser(f"robust-dcp {name}", f"{command.summary}\n\n{textwrap.fill(command.more, _WIDTH)}", examples)
    for names, how in (*command.arguments, _JSON):
        parser.add_argument(*names, **how)
    return parser


class _Completion(argparse.Action):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how, nargs=0)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from robust_dcp.cli import completion

        words = {
            name: {
                option: list(action.choices or ())
                for action in _parser_of(name)._actions
                for option in action.option_strings
            }
            for name in COMMANDS
        }
        completion.run(words, install=self.dest == "install_completion")
        parser.exit()
