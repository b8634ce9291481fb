"""An option counts as it was given: two different values are an error, also if one of them is the default."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from robust_dcp import ReadOptions, RobustReader, RobustWriter, WriteOptions
from robust_dcp.storage.reading.read_options import ReadKeywords
from robust_dcp.storage.writing.write_options import WriteKeywords

OTHER_VALUES: list[tuple[Any, Any, str, Any]] = [
    (RobustReader, ReadOptions, "trusted", True),
    (RobustReader, ReadOptions, "verify_checksums", False),
    (RobustReader, ReadOptions, "verify_checksums", "all"),
    (RobustReader, ReadOptions, "direct", False),
    (RobustReader, ReadOptions, "share_reads", True),
    (RobustReader, ReadOptions, "threads", 3),
    (RobustWriter, WriteOptions, "overwrite", False),
    (RobustWriter, WriteOptions, "layout", "safetensors"),
    (RobustWriter, WriteOptions, "report", False),
    (RobustWriter, WriteOptions, "buffer_bytes", 64 << 20),
]


@pytest.mark.parametrize(("made", "kind", "name", "value"), OTHER_VALUES)
def test_what_was_given_in_options_cannot_be_another_keyword_and_what_was_not_can(
    made: Any, kind: Any, name: str, value: Any, tmp_path: Path
) -> None:
    default = getattr(kind(), name)
    for first, second in ((value, default), (default, value)):
        with pytest.raises(ValueError, match=rf"{name}={second!r} contradicts options, which has {name}={first!r}"):
            made(tmp_path, options=kind(**{name: first}), **{name: second})
        assert getattr(made(tmp_path, options=kind(**{name: first}), **{name: first}).options, name) == first
    assert getattr(made(tmp_path, options=kind(), **{name: value}).options, name) == value
    assert getattr(made(tmp_path, options=kind(**{name: value})).options, name) == value


def test_options_that_were_copied_replaced_or_pickled_are_the_same(tmp_path: Path) -> None:
    options = ReadOptions(trusted=False)
    for same in (copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert same == options
        with pytest.raises(ValueError, match="contradicts"):
            RobustReader(tmp_path, options=same, trusted=True)
    assert RobustReader(tmp_path, options=dataclasses.replace(options, trusted=True)).options.trusted


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (ReadOptions, {"threads": 0}, "threads must be positive, got 0"),
        (ReadOptions, {"buffer_bytes": -1}, "buffer_bytes must be positive, got -1"),
        (ReadOptions, {"verify_checksums": "some"}, "verify_checksums is True, False or \"all\", not 'some'"),
        (WriteOptions, {"layout": "parquet"}, "layout must be one of"),
        (WriteOptions, {"files_per_rank": 0}, "at least"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_named(kind: Any, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    made = RobustReader if kind is ReadOptions else RobustWriter
    for make in (lambda: kind(**options), lambda: made(tmp_path, **options)):
        with pytest.raises(ValueError, match=" ") as caught:
            make()
        assert words in str(caught.value)
    with pytest.raises(TypeError, match="other"):
        made(tmp_path, other=1)


def test_each_option_is_a_keyword_that_type_checkers_know() -> None:
    for keywords, options in ((ReadKeywords, ReadOptions), (WriteKeywords, WriteOptions)):
        assert list(get_type_hints(keywords)) == [field.name for field in dataclasses.fields(options)]
