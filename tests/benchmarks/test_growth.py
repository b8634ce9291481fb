"""The exponents that the benchmark of planning reports are those of the figures."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulation.growth import GROWTH_SIZES, fits_of, stock_sizes


def _rows(who: str, ranks_exponent: float, items_exponent: float, sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    return [
        {
            "who": who,
            "save": "first",
            "ranks": ranks,
            "items_each": items,
            "cpu_seconds": 0.01 * ranks**ranks_exponent * items**items_exponent,
        }
        for ranks, items in sizes
    ]


def test_exponents_are_those_of_a_power_law() -> None:
    rows = _rows("ours", 0.5, 1.0, [*GROWTH_SIZES]) + _rows("stock", 1.25, 2.0, stock_sizes())

    fits = {(fit.who, fit.over): fit for fit in fits_of(rows)}

    assert fits["ours", "ranks"].exponent == pytest.approx(0.5)
    assert fits["ours", "items_each"].exponent == pytest.approx(1.0)
    assert fits["stock", "ranks"].exponent == pytest.approx(1.25)
    assert fits["stock", "items_each"].exponent == pytest.approx(2.0)
    assert fits["stock", "ranks"].at(1024) == pytest.approx(0.01 * 1024**1.25 * 5000**2)
    assert all(fit.largest_deviation == pytest.approx(1.0) for fit in fits.values())


def test_a_figure_off_the_line_is_told() -> None:
    rows = _rows("ours", 1.0, 1.0, [(16, 5000), (32, 5000), (64, 5000)])
    rows[1]["cpu_seconds"] *= 8

    (fit,) = fits_of(rows)

    assert fit.exponent == pytest.approx(1.0)
    assert fit.largest_deviation == pytest.approx(4.0)


def test_two_figures_make_no_line() -> None:
    assert fits_of(_rows("ours", 1.0, 1.0, [(16, 5000), (32, 5000)])) == []
