"""The options of a writer: one value, keywords, or both where they do not contradict each other."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from robust_dcp import RobustWriter, WriteOptions

_OTHERS: dict[str, Any] = {
    "layout": "safetensors",
    "threads": 3,
    "files_per_rank": 5,
    "buffer_bytes": 1 << 24,
    "direct": False,
    "stripe_paths": ["/mnt/other"],
    "overwrite": False,
    "report": False,
}


def test_every_option_has_another_value_here() -> None:
    assert {field.name for field in fields(WriteOptions)} == _OTHERS.keys()


@pytest.mark.parametrize("name", _OTHERS)
def test_an_option_is_given_by_options_by_keyword_or_both(name: str, tmp_path: Path) -> None:
    one = {name: _OTHERS[name]}
    expected = WriteOptions(**one)
    assert expected != WriteOptions()
    assert RobustWriter(tmp_path, options=expected).options == expected
    assert RobustWriter(tmp_path, **one).options == expected
    assert RobustWriter(tmp_path, options=WriteOptions(), **one).options == expected
    assert RobustWriter(tmp_path, options=expected, **one).options == expected


def test_keywords_are_added_to_options(tmp_path: Path) -> None:
    writer = RobustWriter(tmp_path, options=WriteOptions(threads=3), overwrite=False)
    assert writer.options == WriteOptions(threads=3, overwrite=False)
    assert writer.files_per_rank == 3


def test_an_option_that_is_given_twice_and_not_the_same_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"threads=4 contradicts options, which has threads=3: give it once"):
        RobustWriter(tmp_path, options=WriteOptions(threads=3), threads=4)


def test_options_are_frozen_and_given_by_name() -> None:
    with pytest.raises(FrozenInstanceError):
        WriteOptions().threads = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        WriteOptions("torch")  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong", [{"layout": "parquet"}, {"files_per_rank": 0}, {"stripe_paths": ["s3://bucket/x"]}], ids=str
)
def test_what_cannot_be_is_refused_when_options_are_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong.values())) if "layout" in wrong else "at least|://"):
        WriteOptions(**wrong)
