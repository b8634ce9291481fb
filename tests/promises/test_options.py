"""Options are given as an object or as keywords; both together are an error, so none is ignored silently."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from robust_dcp import ReadOptions, RobustReader, RobustWriter, WriteOptions
from robust_dcp.storage.options import ReadKeywords, WriteKeywords


@pytest.mark.parametrize(
    ("made", "kind", "name", "value"),
    [
        (RobustReader, ReadOptions, "trusted", True),
        (RobustReader, ReadOptions, "verify_checksums", "all"),
        (RobustWriter, WriteOptions, "overwrite", False),
        (RobustWriter, WriteOptions, "layout", "safetensors"),
    ],
)
def test_options_are_given_as_an_object_or_as_keywords(
    made: Any, kind: Any, name: str, value: Any, tmp_path: Path
) -> None:
    for options in (kind(**{name: value}), dataclasses.replace(kind(), **{name: value})):
        assert made(tmp_path, options=options).options == made(tmp_path, **{name: value}).options == options
    for other in (kind(), kind(**{name: value})):  # neither is taken silently, whatever the other says
        with pytest.raises(ValueError, match=f"{name} and options were given"):
            made(tmp_path, options=other, **{name: value})


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (ReadOptions, {"threads": 0}, "threads must be positive, got 0"),
        (ReadOptions, {"buffer_bytes": -1}, "buffer_bytes must be positive, got -1"),
        (ReadOptions, {"verify_checksums": "some"}, "verify_checksums is True, False or \"all\", not 'some'"),
        (WriteOptions, {"layout": "parquet"}, "layout must be one of"),
        (WriteOptions, {"files_per_rank": 0}, "at least"),
        (WriteOptions, {"parity_nodes": 1}, "at least"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_named(kind: Any, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    made = RobustReader if kind is ReadOptions else RobustWriter
    for make in (lambda: kind(**options), lambda: made(tmp_path, **options)):
        with pytest.raises(ValueError, match=" ") as caught:
            make()
        assert words in str(caught.value)
    with pytest.raises(TypeError, match=f"{made.__name__} has no option 'treads'; did you mean threads"):
        made(tmp_path, treads=1)
    with pytest.raises(TypeError, match=f"{made.__name__} has no option 'xyz': "):
        made(tmp_path, xyz=1)


def test_each_option_is_a_keyword_that_type_checkers_know() -> None:
    for keywords, options in ((ReadKeywords, ReadOptions), (WriteKeywords, WriteOptions)):
        assert list(get_type_hints(keywords)) == [field.name for field in dataclasses.fields(options)]
