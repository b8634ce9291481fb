"""``robust-dcp``: its commands, and what all of them do with errors.

Exit codes: 0, all is well; 1, the command did its work and found a problem, such as a damaged file or a difference; 2,
it could not do its work; 130, it was stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Final, NoReturn

import typer

from robust_dcp.cli import bench, convert, copy, diff, doctor, inspect, ls, prune, report, verify
from robust_dcp.cli.interrupt import stopped_at_once_in_imports
from robust_dcp.cli.output import CommandFailed, Output, safe_text
from robust_dcp.version import __version__

__all__ = ["CANNOT", "app", "main"]

CANNOT: Final = 2
"""The exit code of a command that could not do its work."""

_STOPPED: Final = 130  # what shells report of a program that SIGINT has ended
_STOPPED_MESSAGE: Final = "stopped"

app = typer.Typer(
    name="robust-dcp",
    help="Look at, check, compare, convert and move PyTorch distributed checkpoints: those of robust_dcp, of stock "
    "torch.distributed.checkpoint and of Megatron-Core. Nothing in a checkpoint is executed.",
    epilog="Exit codes: 0 all is well, 1 a problem was found, 2 the command could not do its work.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _command in (inspect, verify, diff, convert, copy, report, ls, prune, bench, doctor):
    _name = _command.__name__.rpartition(".")[2]
    app.command(_name, epilog="\b\nExamples:\n" + "\n".join(f"  {each}" for each in _command.EXAMPLES))(_command.run)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"robust-dcp {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Run the command that the process was given, and exit."""
    code = 0
    Output.as_json = "--json" in sys.argv  # also for errors in other words, which come before the option is looked at
    try:
        with stopped_at_once_in_imports(_stop_at_once):
            code = app(prog_name="robust-dcp", standalone_mode=False) or 0
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):  # the latter at a question
        code = _STOPPED
    except BrokenPipeError:
        _reader_has_left()
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer's way to handle it, with exit code 1
            _reader_has_left()
        raise
    except CommandFailed as error:
        _exit(CANNOT, str(error))
    except Exception as error:
        show = getattr(error, "show", None)  # typer's own errors, about arguments
        if show is not None and not Output.as_json:
            show()
            raise SystemExit(CANNOT) from None
        if show is None and not _is_expected(error):
            raise
        _exit(CANNOT, getattr(error, "message", None) or str(error))
    if code == _STOPPED:
        _exit(_STOPPED, _STOPPED_MESSAGE)
    raise SystemExit(code)


def _reader_has_left() -> NoReturn:
    """End a command like ``robust-dcp inspect … | head`` without a word."""
    os._exit(0)  # at once, because Python would try to flush stdout, and say that it cannot


def _is_expected(error: Exception) -> bool:
    """Whether the message alone tells the user all that there is to know."""
    ours = sys.modules.get("robust_dcp.errors")
    is_ours: Any = ours is not None and isinstance(error, ours.RobustCheckpointError)
    return bool(is_ours) or isinstance(error, OSError)


def _stop_at_once() -> NoReturn:
    _say(_STOPPED_MESSAGE)
    sys.stdout.flush()
    os._exit(_STOPPED)


def _exit(code: int, message: str) -> NoReturn:
    _say(message)
    raise SystemExit(code)


def _say(error: str) -> None:
    if Output.as_json:
        Output.put({"error": error})
    print(f"robust-dcp: {safe_text(error)}", file=sys.stderr, flush=True)
