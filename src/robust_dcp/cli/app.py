"""``robust-dcp``: finds the command, and says what all commands do with errors and Ctrl-C.

Each command is one module here: its docstring is its help, ``declare`` adds its options to a parser, and ``run`` does
the work. None of them imports torch before ``run`` needs it.

Exit codes: 0, all is well; 1, the command did its work and found a problem, such as a damaged file or a difference; 2,
it could not do its work; 130, it was stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Final, NoReturn

from robust_dcp import __version__
from robust_dcp.cli.output import CANNOT, CommandFailed, Output, safe_text

COMMANDS: Final = ("inspect", "verify", "diff", "convert", "copy", "report", "ls", "prune", "bench", "doctor")

_STOPPED: Final = 130  # what shells report of a program that SIGINT has ended
_COLLECTED_AFTER: Final = 100_000
"""New objects until Python looks for garbage, in place of 700: it would look through those of torch again and again."""


def main() -> NoReturn:
    """Run the command that the process was given, and exit."""
    gc.set_threshold(_COLLECTED_AFTER)
    _open_standard_streams()
    words = sys.argv[1:]
    Output.as_json = "--json" in words  # also for errors in other words, which come before the option is looked at
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # in the background, shells ignore Ctrl-C
    ours = ours and threading.current_thread() is threading.main_thread()
    try:
        run, options = parse(words)
        Output.as_json = options.json
        if ours:
            signal.signal(signal.SIGINT, _stop)
        code = run(options) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _failed("stopped", _STOPPED)
    except BrokenPipeError:
        os._exit(0)  # as of `robust-dcp --help | head`. Python would try to flush stdout, and say that it cannot
    except CommandFailed as error:
        print("" if Output.as_json else error.usage, end="", file=sys.stderr)
        code = _failed(str(error))
    except Exception as error:
        of_ours = getattr(sys.modules.get("robust_dcp.errors"), "RobustCheckpointError", OSError)
        if not isinstance(error, (OSError, of_ours)):
            raise
        code = _failed(getattr(error, "message", None) or str(error))
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()  # at its end Python would look through all objects of torch once more
    raise SystemExit(code)


def parse(words: Sequence[str]) -> tuple[Callable[[Namespace], int | None], Namespace]:
    """What runs the command, and its options. ``--help`` and ``--version`` print, and end the process.

    Raises:
        CommandFailed: the words make no sense.
    """
    name = words[0] if words else "--help"
    if name in COMMANDS:
        command = _module(name)
        parser = _Parser(f"robust-dcp {name}", command.__doc__ or "")
        command.declare(parser)
        parser.add_argument("--json", action="store_true", help="Print one JSON object, sizes in bytes.")
        # Options may stand between paths and patterns, but not where there is a `--`: Python would lose it.
        return command.run, (parser.parse_args if "--" in words else parser.parse_intermixed_args)(words[1:])
    summaries = "\n".join(f"  {each:<10}{(_module(each).__doc__ or '').partition(chr(10))[0]}" for each in COMMANDS)
    parser = _Parser(
        "robust-dcp",
        "Look at, check, compare, convert and move PyTorch distributed checkpoints: those of robust_dcp, of stock\n"
        f"torch.distributed.checkpoint and of Megatron-Core. Nothing in a checkpoint is executed.\n\ncommands:\n"
        f"{summaries}\n\nExit codes: 0 all is well, 1 a problem was found, 2 the command could not do its work.",
    )
    parser.add_argument("--version", action="version", version=f"robust-dcp {__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="command", help="… COMMAND --help says more.")
    parser.parse_known_args(words or ["--help"])
    raise CommandFailed(f"{name} comes after the command", parser.format_usage())


def _open_standard_streams() -> None:
    """Let all three be open, as no file of a checkpoint may get their numbers, and print what their encoding lacks as
    ``\\xe9``."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the shell has closed it: `>&-`
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Says the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        is_said = action.default in (None, False, "", [], argparse.SUPPRESS) or "default" in (action.help or "")
        return (action.help or "") + ("" if is_said else " Default: %(default)s.")


class _Parser(argparse.ArgumentParser):
    def __init__(self, name: str, description: str) -> None:
        super().__init__(
            prog=name,
            description=description,
            allow_abbrev=False,
            formatter_class=lambda prog: _Help(prog, width=Output.width(), max_help_position=34),
        )

    def error(self, message: str) -> NoReturn:
        raise CommandFailed(message, self.format_usage())


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"robust_dcp.cli.{name}")


def _stop(number: int, frame: FrameType | None) -> None:
    """End the process at once, wherever it is: in an import of torch, which catches ``KeyboardInterrupt``, or while
    threads read. A command that has something to clean up gets ``KeyboardInterrupt`` instead."""
    if Output.cleans_up:
        signal.default_int_handler(number, frame)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")  # the line of a progress bar
    _failed("stopped")
    sys.stdout.flush()
    os._exit(_STOPPED)


def _failed(error: str, code: int = CANNOT) -> int:
    with suppress(OSError):  # stdout may be what has failed
        print(f"robust-dcp: {safe_text(error)}", file=sys.stderr, flush=True)
        Output.put({"error": error})
    return code
