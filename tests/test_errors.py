"""An error says each thing once: what happened, on which ranks, and from where in the user's code."""

from __future__ import annotations

import errno
import json
import pickle
import traceback
from collections.abc import Callable

import pytest

from robust_dcp.comm.endings import ErrorMessage, FailuresBelow
from robust_dcp.errors import (
    ExchangeTimeout,
    PlanConflict,
    RankFailure,
    RobustCheckpointError,
    StorageError,
    entry_point,
    failure_of,
)


def _full(rank: int) -> StorageError:
    return StorageError(f"write /ckpt/__{rank}_0.distcp: No space left on device; free space", errno=28)


def _caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def _joint(errors: dict[int, BaseException], phase: str = "save /ckpt: write") -> RobustCheckpointError:
    """What all ranks raise when these failed, by way of the bytes that travel."""
    told = {rank: ErrorMessage.of(error, rank) for rank, error in errors.items()}
    return FailuresBelow(tuple(sorted(errors)), told).joint_error(phase)


def test_ranks_that_fail_alike_are_one_sentence_and_those_that_fail_differently_a_line_each() -> None:
    text = str(_joint({rank: _full(rank) for rank in range(64)}))
    assert text.splitlines() == [_full(0).message, "  raised on ranks 0-63, as rank 0 words it"]
    same = str(_joint({rank: PlanConflict("key 'w' is missing", key="w") for rank in (1, 2, 5)}))
    assert same.splitlines() == ["key 'w' is missing", "  raised on ranks 1-2, 5"]
    text = str(_joint({1: _full(1), 2: LookupError("no momentum"), 3: LookupError("no variance")}))
    assert text.splitlines() == [
        *(_full(1).message, "  raised on rank 1"),
        *("  rank 2: LookupError: no momentum", "  rank 3: LookupError: no variance"),
    ]
    failed = "'save /ckpt: write' failed on "
    assert str(_joint({3: LookupError("lost my state")})) == f"{failed}rank 3: LookupError: lost my state"
    assert str(_joint({3: KeyboardInterrupt()})) == f"{failed}rank 3: KeyboardInterrupt"
    assert str(_joint({0: ValueError("a"), 1: KeyError("b")})).splitlines() == [
        f"{failed}ranks 0-1: KeyError, ValueError",
        *("  rank 0: ValueError: a", "  rank 1: KeyError: 'b'"),
    ]


class _Momentum:
    def state_dict(self) -> object:
        try:
            return {}["momentum"]
        except KeyError:
            raise LookupError("lost my state") from None

    def chained(self) -> object:
        try:
            return {}["momentum"]
        except KeyError as error:
            raise LookupError("lost my state") from error

    def while_handling(self) -> object:
        try:
            return {}["momentum"]
        except KeyError:
            raise LookupError("lost my state")  # noqa: B904 (what users write)

    def in_python(self) -> object:
        return json.loads("{")


def _called_by_us(call: Callable[[], object]) -> BaseException:
    """``call`` raises below frames of ours, as in an exchange."""
    return _caught(entry_point(entry_point(call)))


def test_the_stack_of_user_code_is_shown_without_ours_and_pythons() -> None:
    stack = failure_of(0, _called_by_us(_Momentum().state_dict)).traceback_text
    assert 'raise LookupError("lost my state") from None' in stack
    assert "robust_dcp/errors.py" not in stack and "KeyError" not in stack
    stack = failure_of(0, _called_by_us(_Momentum().in_python)).traceback_text
    assert 'json.loads("{")' in stack and "decoder.py" not in stack
    assert "^" not in stack


@pytest.mark.parametrize("how", ["chained", "while_handling"])
def test_what_led_to_an_error_of_the_user_is_told_in_a_word(how: str) -> None:
    failure = failure_of(0, _called_by_us(getattr(_Momentum(), how)))
    words = "caused by" if how == "chained" else "while handling"
    assert f"{words} KeyError: 'momentum'\n" in failure.traceback_text
    assert "exception" not in failure.traceback_text  # nothing of Python's "During handling of the above exception"
    assert failure.message == "lost my state"


def test_an_error_of_ours_has_no_stack_and_one_from_user_code_has_that_code() -> None:
    def refuse() -> None:
        raise PlanConflict("no")

    expected = refuse.__code__.replace(co_filename=failure_of.__code__.co_filename)
    refuse.__code__ = expected
    assert failure_of(0, _caught(refuse)).traceback_text.count("File") == 1  # this test called it

    def wrap() -> None:
        try:
            _Momentum().state_dict()
        except LookupError as error:
            raise RobustCheckpointError(f"cannot plan 'w': LookupError: {error}") from error

    failure = failure_of(0, _caught(wrap))
    assert "in state_dict" in failure.traceback_text
    assert "caused by" not in failure.traceback_text  # the message says so already


def test_a_fault_in_our_own_code_shows_all_of_the_stack() -> None:
    error = _caught(lambda: exec(compile("1 / 0", failure_of.__code__.co_filename, "exec"), {}))
    ours = error.__traceback__
    while ours is not None and ours.tb_frame.f_code.co_filename == __file__:
        ours = ours.tb_next
    stack = failure_of(0, error.with_traceback(ours)).traceback_text
    assert "robust_dcp/errors.py" in stack


def test_a_stack_without_end_is_cut_and_a_circle_of_causes_ends() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert failure_of(0, one).message == "one"

    def deeper(n: int) -> int:
        return deeper(n + 1) + 1

    stack = failure_of(0, _caught(lambda: deeper(0))).traceback_text
    assert "calls left out" in stack and len(stack) < 10_000


def test_our_errors_leave_an_entry_point_without_our_stack_and_without_a_chain() -> None:
    cause = LookupError("lost")

    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise PlanConflict("key 'w' is missing", key="w") from cause

    error = _caught(lambda: entry_point(deep)(5))
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    assert text.count("Traceback") == 1 and "in deep" not in text and "lost" not in text
    assert text.count("robust_dcp/errors.py") == 1
    assert error.__context__ is cause  # for a debugger
    assert isinstance(error, PlanConflict) and error.key == "w"


def test_a_brief_error_keeps_class_and_fields() -> None:
    error = PlanConflict("key 'w' " + "x" * 500 + "\nand more", key="w", failures=[RankFailure(0, "E", "long")])
    brief = pickle.loads(pickle.dumps(error.in_brief()))
    assert type(brief) is PlanConflict and brief.key == "w"
    assert brief.rank_failures == (RankFailure(0, "E", "long"),)
    assert (
        len(str(brief)) < 250
        and "\n" not in str(brief)
        and str(brief).startswith("key 'w'")
        and "coordinator" in str(brief)
    )


@pytest.mark.parametrize(
    ("error", "number"),
    [(ExchangeTimeout("m"), None), (StorageError("m"), None), (StorageError("m", errno=errno.ENOSPC), errno.ENOSPC)],
)
def test_an_os_error_has_the_number_that_it_was_given_and_no_text_of_the_system(
    error: OSError, number: int | None
) -> None:
    assert (error.errno, error.strerror, error.filename) == (number, None, None)
    assert str(error) == "m"
