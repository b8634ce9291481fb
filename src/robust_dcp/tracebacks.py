"""Which frames of a stack an error shows: those of the code that the user can change.

This module chooses the frames and formats them. It never shows a frame of robust_dcp or torch if the stack also has
frames of the user's code. ``errors`` calls it to describe the failure of a rank.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from functools import cache

import msgspec
import numpy
import torch

__all__ = ["user_stack"]

_MAX_FRAMES = 20
_MAX_CAUSES = 4


def user_stack(error: BaseException, expected: type[BaseException]) -> str:
    """Format the frames of user code from the traceback of ``error`` and of the exceptions that led to it.

    The text is empty if there are no such frames. But if ``error`` is not ``expected``, an error without user code
    is a bug of ours or of a library that we call. Then all frames are shown.

    Args:
        error: a caught exception. Its traceback begins where it was caught.
        expected: the class of exceptions that need no stack, because their message says everything.
    """
    lines: list[str] = []
    text = _one_line(error)
    for how, each in _chain(error):
        frames = [frame for frame in traceback.extract_tb(each.__traceback__) if _is_user_code(frame.filename)]
        if not frames and each is error and not isinstance(each, expected):
            frames = list(traceback.extract_tb(each.__traceback__))
        what = _one_line(each)
        if how and frames and what not in text:
            lines.append(f"{how} {what}")
        lines += _formatted(frames)
    return "\n".join(lines)


def _chain(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """``error`` and the exceptions that led to it, latest first, each with the words that connect it to the last."""
    how, each = "", error
    seen: set[int] = set()
    while len(seen) < _MAX_CAUSES and id(each) not in seen:
        seen.add(id(each))
        yield how, each
        if each.__cause__ is not None:
            how, each = "caused by", each.__cause__
        elif each.__context__ is not None and not each.__suppress_context__:
            how, each = "while handling", each.__context__
        else:
            return


def _one_line(error: BaseException) -> str:
    """The type and message, as Python prints them."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _formatted(frames: list[traceback.FrameSummary]) -> list[str]:
    left_out = len(frames) - _MAX_FRAMES
    if left_out > 0:
        frames = frames[: _MAX_FRAMES // 2] + frames[-(_MAX_FRAMES // 2) :]
    lines = []
    for place, frame in enumerate(frames):
        if left_out > 0 and place == _MAX_FRAMES // 2:
            lines.append(f"[{left_out} calls left out]")
        lines.append(f'File "{frame.filename}", line {frame.lineno}, in {frame.name}')
        if frame.line:
            lines.append(f"  {frame.line}")
    return lines


@cache
def _is_user_code(filename: str) -> bool:
    """Whether a file belongs neither to robust_dcp, nor to Python, nor to a package that robust_dcp builds on."""
    if filename.startswith("<frozen") or filename.startswith(_PACKAGES):
        return False
    is_installed = "site-packages" in filename or "dist-packages" in filename
    return is_installed or not filename.startswith(_PYTHON)


def _directory_of(file: str | None) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(file or "")), "")


_PACKAGES = tuple(map(_directory_of, (__file__, torch.__file__, numpy.__file__, msgspec.__file__)))
_PYTHON = _directory_of(os.__file__)
