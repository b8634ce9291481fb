"""``robust-dcp``: runs one command, and says what all commands do with errors and Ctrl-C.

Exit codes: 0, all is well; 1, the command did its work and found a problem, such as a damaged file or a difference; 2,
it could not do its work; 130, it was stopped by Ctrl-C.

Ctrl-C ends the process at once, wherever it is: in an import of torch, which cannot be broken off in an orderly way, or
while threads read. Only commands that have something to clean up get ``KeyboardInterrupt``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, NoReturn

from robust_dcp.cli.output import CommandFailed, Output, safe_text
from robust_dcp.cli.parser import WrongWords, parse

__all__ = ["CANNOT", "main"]

CANNOT: Final = 2
"""The exit code of a command that could not do its work."""

_STOPPED: Final = 130  # what shells report of a program that SIGINT has ended
_CLEANS_UP: Final = ("convert", "copy", "doctor", "prune")
_HEAVY: Final = ("numpy", "robust_dcp", "torch")


def main() -> NoReturn:
    """Run the command that the process was given, and exit."""
    words = sys.argv[1:]
    Output.as_json = "--json" in words  # also for errors in other words, which come before the option is looked at
    try:
        name, options = parse(words)
        Output.as_json = options.pop("json")
        run = importlib.import_module(f"robust_dcp.cli.{name}").run
        with _stopped_at_once(cleans_up=name in _CLEANS_UP):
            code = run(**options) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        _exit(_STOPPED, "stopped")
    except BrokenPipeError:
        os._exit(0)  # as of `robust-dcp inspect … | head`. Python would try to flush stdout, and say that it cannot
    except WrongWords as error:
        if not Output.as_json:
            print(error.usage, end="", file=sys.stderr)
        _exit(CANNOT, str(error))
    except CommandFailed as error:
        _exit(CANNOT, str(error))
    except Exception as error:
        if not _is_expected(error):
            raise
        _exit(CANNOT, getattr(error, "message", None) or str(error))
    raise SystemExit(code)


@contextlib.contextmanager
def _stopped_at_once(*, cleans_up: bool) -> Iterator[None]:
    """Let Ctrl-C end the process within the block. A process that ignores it, as one that a shell has put in the
    background, still ignores it.

    Args:
        cleans_up: whether the command is to get ``KeyboardInterrupt``, except while it imports: torch and numpy catch
            it there, or end in other errors, and nothing has been touched by then.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if cleans_up and not _is_importing(frame):
            signal.default_int_handler(number, frame)
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")  # the line of a progress bar
        _say("stopped")
        sys.stdout.flush()
        os._exit(_STOPPED)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether the body of a module of heavy packages is on the stack."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "<module>" and name.partition(".")[0] in _HEAVY:
            return True
        frame = frame.f_back
    return False


def _is_expected(error: Exception) -> bool:
    """Whether the message alone tells the user all that there is to know."""
    ours = sys.modules.get("robust_dcp.errors")
    is_ours: Any = ours is not None and isinstance(error, ours.RobustCheckpointError)
    return bool(is_ours) or isinstance(error, OSError)


def _exit(code: int, message: str) -> NoReturn:
    _say(message)
    raise SystemExit(code)


def _say(error: str) -> None:
    if Output.as_json:
        Output.put({"error": error})
    print(f"robust-dcp: {safe_text(error)}", file=sys.stderr, flush=True)
