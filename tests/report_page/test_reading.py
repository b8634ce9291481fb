"""Reports are found below a directory, and one that is torn, forged or of another save is skipped with its reason."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from robust_dcp.report import REPORT_NAME, VERSION, decode_report, encode_report
from robust_dcp.report_page import NoReports, read_reports, render_page
from tests.report_page.made_reports import made_report, put_report, put_run


def test_what_is_written_is_what_is_read() -> None:
    report = made_report(100, 64, slow=(3,))
    assert decode_report(encode_report(report)) == report
    assert report.stragglers[0].rank == 3


def test_the_reports_of_a_run_are_in_the_order_of_their_saves(tmp_path: Path) -> None:
    put_run(tmp_path, 2, 12)
    put_report(tmp_path / "other" / "step_5", made_report(5, 2))
    found = read_reports(tmp_path)
    assert [each.name for each in found.found] == ["other/step_5", *(f"step_{100 * n}" for n in range(1, 13))]
    (alone,) = read_reports(tmp_path / "step_300").found
    assert (alone.name, alone.report.checkpoint) == ("step_300", "/checkpoints/run/step_300")


def _changed(change: Callable[[dict[str, object]], object]) -> bytes:
    document = msgspec.json.decode(encode_report(made_report(7, 4)), type=dict[str, object])
    change(document)
    return msgspec.json.encode(document)


def _in(column: str, name: str, value: object) -> bytes:
    return _changed(lambda document: document[column].update({name: value}))  # type: ignore[attr-defined]


BAD: dict[str, tuple[bytes, str]] = {
    "torn": (encode_report(made_report(7, 4))[:500], "no report of a save"),
    "empty": (b"", "no report of a save"),
    "zeros": (bytes(5000), "no report of a save"),
    "no JSON": (b"\xff\xfe<html>", "no report of a save"),
    "nested": (b"[" * 200_000, "no report of a save"),
    "newer": (_changed(lambda document: document.update(version=VERSION + 1)), "that this robust_dcp knows"),
    "uneven": (_in("ranks", "nbytes", [1, 2]), "ranks.nbytes has 2 rows"),
    "negative": (_in("ranks", "write_seconds", [1, 1, 1, -1]), "write_seconds"),
    "no node": (_in("ranks", "node", [0, 0, 0, 9]), "node without a name"),
    "no way": (_in("ranks", "how", [0, 0, 0, 9]), "way that is not listed"),
    "twice": (_in("ranks", "rank", [0, 1, 1, 2]), "two rows"),
    "loop": (_in("modules", "parent", [-1, 2, 1]), "uneven columns"),
    "text for a number": (_in("ranks", "files", ["<b>"] * 4), "no report of a save"),
    "a forged id": (_changed(lambda document: document.update(save_id="<script>")), "save_id"),
    "another save": (encode_report(made_report(8, 4)), "of another save"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_report_that_is_not_believed_is_skipped_by_name(what: str, tmp_path: Path) -> None:
    data, reason = BAD[what]
    put_report(tmp_path / "good", made_report(6, 4))
    bad = put_report(tmp_path / "bad", made_report(7, 4))
    (bad / REPORT_NAME).write_bytes(data)
    found = read_reports(tmp_path)
    assert [each.name for each in found.found] == ["good"]
    (skipped,) = found.skipped
    assert skipped.name == "bad" and reason in skipped.reason
    assert '"n_skipped":1' in render_page(found)
    with pytest.raises(NoReports, match=re.escape(reason)):
        read_reports(bad)


def test_a_file_that_is_no_plain_file_or_far_too_long_is_not_read(tmp_path: Path) -> None:
    put_report(tmp_path / "good", made_report(6, 4))
    for name, put in (("pipe", os.mkfifo), ("directory", os.mkdir)):
        directory = put_report(tmp_path / name, made_report(7, 4))
        (directory / REPORT_NAME).unlink()
        put(directory / REPORT_NAME)
    linked = put_report(tmp_path / "link", made_report(6, 4))
    (linked / REPORT_NAME).unlink()
    (linked / REPORT_NAME).symlink_to(tmp_path / "good" / REPORT_NAME)
    found = read_reports(tmp_path)
    assert [each.name for each in found.found] == ["good"]
    assert [each.name for each in found.skipped] == ["directory", "link", "pipe"]
    os.truncate(tmp_path / "good" / REPORT_NAME, 20 << 30)
    with pytest.raises(NoReports, match=r"has more than \d+ bytes, so it is no report"):
        read_reports(tmp_path / "good")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (Path.unlink, "no checkpoint is committed there: it has a report and no .metadata"),
        (lambda path: path.write_bytes(b""), "of another save"),
        (lambda path: (path.unlink(), os.mkfifo(path)), ".metadata is no regular file"),
    ],
)
def test_a_report_counts_only_beside_the_metadata_of_its_save(
    change: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    bad = put_report(tmp_path / "bad", made_report(7, 4))
    change(bad / ".metadata")
    with pytest.raises(NoReports, match=re.escape(reason)):
        read_reports(bad)


def test_where_nothing_can_be_shown_the_error_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(NoReports, match="is not there: pass the directory of a checkpoint"):
        read_reports(tmp_path / "nowhere")
    with pytest.raises(NoReports, match="no checkpoint lies there"):
        read_reports(tmp_path)
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / ".metadata").write_bytes(b"stock")
    with pytest.raises(NoReports, match="step_1: it has no report: another program saved it"):
        read_reports(tmp_path)
