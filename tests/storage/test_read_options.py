"""The options of a reader: together, one by one, or both as long as they agree."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from robust_dcp import ReadOptions, RobustReader


def test_keywords_make_the_options(tmp_path: Path) -> None:
    assert RobustReader(tmp_path).options == ReadOptions()
    reader = RobustReader(tmp_path, threads=3, verify_checksums="all", direct=False)
    assert reader.options == ReadOptions(threads=3, verify_checksums="all", direct=False)


def test_keywords_are_added_to_options(tmp_path: Path) -> None:
    options = ReadOptions(threads=3, trusted=True)
    assert RobustReader(tmp_path, options=options).options == options
    found = RobustReader(tmp_path, options=options, block_bytes=1 << 20, threads=3).options
    assert found == dataclasses.replace(options, block_bytes=1 << 20)


def test_an_option_that_is_given_twice_and_differs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="threads=2 contradicts options, which has threads=3") as caught:
        RobustReader(tmp_path, options=ReadOptions(threads=3), threads=2)
    assert "dataclasses.replace(options, threads=2)" in str(caught.value)


def test_reader_takes_each_option_as_a_keyword_with_the_same_default() -> None:
    keywords = inspect.signature(RobustReader).parameters
    for field in dataclasses.fields(ReadOptions):
        assert keywords[field.name].default == field.default, field.name
        assert keywords[field.name].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 0}, "threads must be positive, got 0"),
        ({"buffer_bytes": -1}, "buffer_bytes must be positive, got -1"),
        ({"block_bytes": 0}, "block_bytes must be positive, got 0"),
        ({"verify_checksums": "some"}, "verify_checksums is True, False or \"all\", not 'some'"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    for make in (lambda: ReadOptions(**options), lambda: RobustReader(tmp_path, **options)):
        with pytest.raises(ValueError, match=r"must be|is True") as caught:
            make()
        assert words in str(caught.value)


def test_options_do_not_change_and_are_given_by_name() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ReadOptions().threads = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        ReadOptions(2)  # type: ignore[call-arg]
