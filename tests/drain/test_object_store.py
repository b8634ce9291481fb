"""Copies to an S3 server on this machine, through a proxy that fails; and saves and loads by URL."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp import CopyOptions, RobustReader, RobustWriter, StorageError, copy_checkpoint
from robust_dcp.report_page import read_reports
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.harness.ranks import run_ranks, values
from torture.object_store import BUCKET, Fault, FaultyProxy, faulty_proxy, options_for, s3_server

StateDict = dict[str, Any]

PART_NBYTES = 5 << 20
N_ITEMS = 4_000_000  # more than one part in each of two files, as float32


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def proxy(server: str) -> Iterator[FaultyProxy]:
    with faulty_proxy(server) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("source") / "step_1")
    robust_dcp.save(state_dict(1.0), checkpoint_id=path)
    return path


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
    return f"s3://{BUCKET}/{name}/step_1"


@pytest.fixture
def environment(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a job has in its environment for such a store."""
    s3fs.S3FileSystem.clear_instance_cache()  # one that another test has made would go on to talk to its proxy
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    monkeypatch.setenv("ROBUST_DCP_STAGING", str(tmp_path / "staging"))


def state_dict(value: float) -> StateDict:
    return {"one": torch.full((N_ITEMS // 2,), value), "two": torch.full((N_ITEMS // 2,), value)}


def options(proxy: FaultyProxy, **more: Any) -> CopyOptions:
    store = options_for(proxy.endpoint)
    return CopyOptions(part_bytes=PART_NBYTES, source_options=store, target_options=store, **more)


def loaded_back(url: str, proxy: FaultyProxy, directory: Path) -> float:
    """Copied from the store and loaded: each byte is verified on the way."""
    copy_checkpoint(url, directory, options=options(proxy))
    found = state_dict(-1.0)
    robust_dcp.load(found, checkpoint_id=directory)
    (value,) = torch.cat([found["one"], found["two"]]).unique().tolist()
    return float(value)


@pytest.mark.parametrize(
    ("fault", "method", "part"),
    [
        ("cut request", "PUT", "partNumber=1"),
        ("503", "POST", "uploads"),
        ("cut answer", "POST", "uploadId"),
        ("500", "PUT", ".metadata"),
    ],
)
def test_what_passes_by_itself_is_tried_again_until_all_has_arrived(
    fault: Fault, method: str, part: str, source: str, url: str, proxy: FaultyProxy
) -> None:
    proxy.fail(fault, method, part, times=2)
    result = copy_checkpoint(source, url, options=options(proxy, threads=2))
    assert proxy.n_faults == 2
    assert result.verified_by_store == 4  # by the MD5 that S3 gives; .metadata was read back


@pytest.mark.parametrize("part", ["", "partNumber=2"])
def test_what_is_denied_is_not_tried_again(part: str, source: str, url: str, proxy: FaultyProxy) -> None:
    proxy.fail("403", "PUT", part, times=1000)
    with pytest.raises(StorageError, match=r"s3://.*PermissionError.*check the credentials.*not tried again"):
        copy_checkpoint(source, url, options=options(proxy, threads=1))
    assert proxy.n_faults == 1


def test_a_store_that_never_answers_ends_the_copy(source: str, url: str, proxy: FaultyProxy) -> None:
    proxy.fail("slow", "PUT", "", times=1000)
    impatient = options(proxy, retries=1, call_timeout_seconds=0.2)
    with pytest.raises(StorageError, match=r"no answer within 0\.2 seconds.* after 2 tries"):
        copy_checkpoint(source, url, options=impatient)


def test_a_bucket_that_is_not_there_is_named(source: str, proxy: FaultyProxy) -> None:
    with pytest.raises(StorageError, match=r"s3://nowhere/step_1.*check the URL"):
        copy_checkpoint(source, "s3://nowhere/step_1", options=options(proxy))


def _copy_until_killed(source: str, url: str, endpoint: str) -> None:
    """Killed when the second part of a file has arrived: before the third."""
    with faulty_proxy(endpoint) as proxy:

        def kill(method: str, path: str) -> None:
            if method == "POST" and "uploadId" in path:
                os.kill(os.getpid(), signal.SIGKILL)

        proxy.fault = kill
        copy_checkpoint(source, url, options=options(proxy, threads=1))


def test_a_copy_that_was_killed_goes_on_with_the_parts_that_have_arrived(
    source: str, url: str, server: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    (killed,) = run_ranks(1, _copy_until_killed, source, url, server, init=False)
    assert killed.exitcode == -signal.SIGKILL
    filesystem, root = fsspec.url_to_fs(url, **options_for(server))
    assert not filesystem.exists(f"{root}/.metadata")
    proxy.requests.clear()
    copy_checkpoint(source, url, options=options(proxy, threads=1))
    first_file = [path for method, path in proxy.requests if method == "PUT" and "__0_0.distcp" in path]
    assert first_file == []  # its parts were there, and it only had to be put together
    assert loaded_back(url, proxy, tmp_path / "back") == 1.0


def uploads_of(url: str, endpoint: str) -> list[dict[str, Any]]:
    """The uploads below a URL that were not finished."""
    filesystem, root = fsspec.url_to_fs(url, **options_for(endpoint))
    bucket, prefix, _ = filesystem.split_path(root)
    listed = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
    return list(listed.get("Uploads") or ())


def remove_uploads(url: str, endpoint: str) -> None:
    filesystem, _ = fsspec.url_to_fs(url, **options_for(endpoint))
    for each in uploads_of(url, endpoint):
        filesystem.call_s3("abort_multipart_upload", Bucket=BUCKET, Key=each["Key"], UploadId=each["UploadId"])


@pytest.mark.parametrize("what", ["finished by another copy", "removed"])
def test_a_file_whose_upload_is_gone_arrives_all_the_same(
    what: str, source: str, url: str, server: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    gone: list[str] = []
    direct = CopyOptions(part_bytes=PART_NBYTES, target_options=options_for(server))

    def before_a_second_part(method: str, path: str) -> Fault | None:
        upload = path.partition("uploadId=")[2].partition("&")[0]
        if "partNumber=2" in path and not gone:
            gone.append(upload)
            if what == "removed":
                remove_uploads(url, server)
            else:
                copy_checkpoint(source, url, options=direct)
        return "404" if upload in gone else None  # as S3 does; moto fails

    proxy.fault = before_a_second_part
    copy_checkpoint(source, url, options=options(proxy, threads=1))
    assert proxy.n_faults == 1
    assert uploads_of(url, server) == []
    assert loaded_back(url, proxy, tmp_path / "back") == 1.0


def test_of_several_uploads_that_were_cut_off_the_newest_goes_on_and_the_others_are_removed(
    source: str, url: str, server: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    filesystem, root = fsspec.url_to_fs(url, **options_for(server))
    place = {"Bucket": BUCKET, "Key": f"{root.partition('/')[2]}/__0_0.distcp"}
    data = Path(source, "__0_0.distcp").read_bytes()
    for _ in range(3):
        upload = filesystem.call_s3("create_multipart_upload", **place)["UploadId"]
        for number, first in enumerate(range(0, len(data), PART_NBYTES), start=1):
            part = data[first : first + PART_NBYTES]
            filesystem.call_s3("upload_part", **place, UploadId=upload, PartNumber=number, Body=part)
    call_s3 = s3fs.S3FileSystem.call_s3

    def list_one_by_one(filesystem: Any, method: str, **arguments: Any) -> Any:
        return call_s3(filesystem, method, **arguments, **({"MaxParts": 1} if method == "list_parts" else {}))

    monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", list_one_by_one)
    copy_checkpoint(source, url, options=options(proxy, threads=1))
    assert [path for method, path in proxy.requests if method == "PUT" and "__0_0.distcp" in path] == []
    assert uploads_of(url, server) == []
    assert loaded_back(url, proxy, tmp_path / "back") == 1.0


def test_a_byte_that_is_flipped_in_the_store_is_found_and_sent_again(
    source: str, url: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    copy_checkpoint(source, url, options=options(proxy))
    filesystem, root = fsspec.url_to_fs(url, **options_for(proxy.endpoint))
    data = bytearray(filesystem.cat_file(f"{root}/__0_1.distcp"))
    data[len(data) // 2] ^= 1
    filesystem.pipe_file(f"{root}/__0_1.distcp", bytes(data))
    for verify in ("store", "read"):
        again = copy_checkpoint(source, url, options=options(proxy, verify=verify))
        assert again.files == (1 if verify == "store" else 0)
    assert loaded_back(url, proxy, tmp_path / "back") == 1.0


@pytest.mark.usefixtures("environment")
def test_a_load_by_url_reads_only_what_it_needs(source: str, url: str, proxy: FaultyProxy) -> None:
    copy_checkpoint(source, url)
    proxy.requests.clear()
    found = {"two": torch.zeros(N_ITEMS // 2)}
    report = robust_dcp.load(found, checkpoint_id=url)
    assert bool((found["two"] == 1.0).all())
    assert report.unverified_nbytes == 0
    assert len({path.partition("?")[0] for method, path in proxy.requests if "distcp" in path and method == "GET"}) == 1


@pytest.mark.usefixtures("environment")
def test_of_a_url_without_a_checkpoint_the_error_says_so(url: str) -> None:
    with pytest.raises(StorageError, match=r"(?s)no \.metadata in s3://.*nothing whose name begins with that"):
        robust_dcp.load(state_dict(0.0), checkpoint_id=url)


def _save_and_load(url: str) -> tuple[str, float, list[str]]:
    rank = dist.get_rank()
    mine = {f"of_{rank}": torch.full((1000,), float(rank + 1)), "all": torch.ones(3)}
    robust_dcp.save({**mine, "all": torch.zeros(3)}, checkpoint_id=url)
    robust_dcp.save(mine, checkpoint_id=url)
    report = robust_dcp.async_save(mine, checkpoint_id=f"{url}_async").result()
    total = 0.0
    for place in (url, f"{url}_async"):
        found = {name: torch.zeros_like(each) for name, each in mine.items()}
        robust_dcp.load(found, checkpoint_id=place)
        total += float(sum(each.sum() for each in found.values()))
    return report.checkpoint_id, total, os.listdir(os.environ["ROBUST_DCP_STAGING"])


@pytest.mark.usefixtures("environment")
def test_ranks_save_to_a_url_and_load_from_it(url: str) -> None:
    outcome = values(run_ranks(2, _save_and_load, url, timeout_seconds=120))
    assert outcome == [(f"{url}_async", 2 * (1000.0 + 3), []), (f"{url}_async", 2 * (2000.0 + 3), [])]


@pytest.mark.usefixtures("environment")
def test_what_was_saved_to_a_url_names_that_url(url: str, tmp_path: Path) -> None:
    writer = RobustWriter(tmp_path / "elsewhere")
    robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=url, storage_writer=writer)
    meta = RobustReader(url).read_metadata().storage_meta
    assert meta is not None and meta.checkpoint_id == url
    copy_checkpoint(url, tmp_path / "copied")
    (found,) = read_reports(tmp_path / "copied").found
    assert found.report.checkpoint == url

    robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "local", storage_writer=writer)
    meta = RobustReader(tmp_path / "local").read_metadata().storage_meta
    assert meta is not None and meta.checkpoint_id == str(tmp_path / "local")


@pytest.mark.usefixtures("environment")
def test_a_save_whose_copy_fails_keeps_the_local_one_and_can_go_on(
    url: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    proxy.fail("403", "PUT", ".metadata", times=1)
    with pytest.raises(StorageError, match=r"put object s3://.*\.metadata"):
        robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=url)
    (staged,) = (tmp_path / "staging").iterdir()
    copy_checkpoint(staged, url)
    found = {"w": torch.zeros(3)}
    robust_dcp.load(found, storage_reader=RobustReader(url))
    assert found["w"].tolist() == [1.0] * 3


@pytest.mark.usefixtures("environment")
def test_a_staging_directory_without_room_is_named_before_anything_is_written(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PosixDisk, "room", lambda self, path: (0, 10))
    with pytest.raises(StorageError, match=r"has no room.* bytes are needed there for rank 0, 10 are free"):
        robust_dcp.save({"w": torch.ones(3000)}, checkpoint_id=url)
