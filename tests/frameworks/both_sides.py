"""What every framework promises: saved by robust_dcp or by stock, and loaded by either, training is the same."""

from __future__ import annotations

from pathlib import Path

from tests.frameworks.jobs import checkpoints_in, is_ours, run_job

__all__ = ["check_both_sides"]


def check_both_sides(program: str, *arguments: str, directory: Path, equal: list[str]) -> list[str]:
    """Run ``program save …`` with the variable and without, and ``program load …`` on what each has written.

    Asserts that the variable alone decides who writes, that the losses are the same with it and without, that a load of
    either side by robust_dcp, and of ours by stock, restores the state bit for bit, and that training then goes on with
    the same losses.

    Args:
        program: a module of the folder ``programs``.
        arguments: come between the command and the directories.
        directory: an empty one.
        equal: the names of the states that one ``load`` compares.

    Returns:
        The names of the checkpoints that each side has written, sorted.
    """
    ours, stock = directory / "ours", directory / "stock"
    losses, names = [], []
    for robust, place in ((True, ours), (False, stock)):
        saved = run_job(program, "save", *arguments, place, robust=robust)
        written = checkpoints_in(place)
        assert written and all(is_ours(path) is robust for path in written)
        assert saved.announcements == robust
        assert saved.stays_stock == []
        losses.append(saved.losses)
        names.append([path.name for path in written])
    assert losses[0] == losses[1] != []
    assert names[0] == names[1]
    by_stock = run_job(program, "load", *arguments, ours, robust=False)
    assert (by_stock.equal, by_stock.announcements) == (equal, 0)
    assert by_stock.losses != []
    by_ours = run_job(program, "load", *arguments, ours, stock, robust=True)
    assert (by_ours.equal, by_ours.announcements, by_ours.stays_stock) == (sorted(2 * equal), 1, [])
    assert by_ours.losses == 2 * by_stock.losses
    return names[0]
