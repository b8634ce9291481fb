"""The options of a reader: together, one by one, or both as long as they agree."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from robust_dcp import ReadOptions, RobustReader, RobustWriter, WriteOptions
from robust_dcp.storage.reading.read_options import ReadKeywords
from robust_dcp.storage.writing.write_options import WriteKeywords


def test_an_option_that_is_given_twice_and_differs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="threads=2 contradicts options, which has threads=3") as caught:
        RobustReader(tmp_path, options=ReadOptions(threads=3), threads=2)
    assert "dataclasses.replace(options, threads=2)" in str(caught.value)


def test_reader_and_writer_take_each_option_as_a_keyword(tmp_path: Path) -> None:
    for keywords, options in ((ReadKeywords, ReadOptions), (WriteKeywords, WriteOptions)):
        assert list(get_type_hints(keywords)) == [field.name for field in dataclasses.fields(options)]
    for make in (RobustReader, RobustWriter):
        with pytest.raises(TypeError, match="other"):
            make(tmp_path, other=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 0}, "threads must be positive, got 0"),
        ({"buffer_bytes": -1}, "buffer_bytes must be positive, got -1"),
        ({"verify_checksums": "some"}, "verify_checksums is True, False or \"all\", not 'some'"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    for make in (lambda: ReadOptions(**options), lambda: RobustReader(tmp_path, **options)):
        with pytest.raises(ValueError, match=r"must be|is True") as caught:
            make()
        assert words in str(caught.value)
