"""Copies to and from stores: S3 (moto, which fails when told to) and others of fsspec; saves and loads by URL."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

import robust_dcp
from robust_dcp import CopyOptions, CorruptCheckpoint, StorageError, copy_checkpoint
from tests.drain.checkpoints import ONE_THREAD, loaded, save
from tests.harness.damage import data_files
from tests.harness.ranks import run_ranks, values

PART_NBYTES = 5 << 20
N_ITEMS = 2_800_000  # more than one part in each of two files, as float32


BUCKET = "bucket"

Fault = Literal["cut request", "cut answer", "500", "503", "403"]

_CODES = {"403": "AccessDenied", "500": "InternalError", "503": "SlowDown"}


class FaultyStore:
    """An S3 server in this process (moto's) with one empty bucket, which cuts connections or answers with errors when a
    test tells it to.

    Attributes:
        endpoint: its URL.
        fault: asked for each request, by method and path; what it returns happens.
        requests: method and path of each request, in order.
        n_faults: how many ended in a fault.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self.endpoint = ""
        self.requests: list[tuple[str, str]] = []
        self._app = DomainDispatcherApplication(create_backend_app)
        self.clear()

    def clear(self) -> None:
        self.fault: Callable[[str, str], Fault | None] = lambda method, path: None
        self.n_faults = 0
        self.requests.clear()

    @property
    def options(self) -> dict[str, Any]:
        """What fsspec passes to s3fs. The client itself repeats nothing: that is what is tested."""
        return {
            "key": "testing",
            "secret": "testing",
            "endpoint_url": self.endpoint,
            "skip_instance_cache": True,
            "config_kwargs": {"retries": {"max_attempts": 0}, "read_timeout": 60, "connect_timeout": 60},
        }

    def fail(self, fault: Fault, method: str, part: str, *, times: int) -> None:
        """Let the next ``times`` requests of a method, whose path holds ``part``, end in a fault."""
        left = [fault] * times
        self.fault = lambda own, path: left.pop() if own == method and part in path and left else None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        path = f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append((method, path))
        fault = self.fault(method, path)
        self.n_faults += fault is not None
        if fault == "cut request":
            raise ConnectionAbortedError  # the server closes the connection
        if fault in _CODES:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = f"<Error><Code>{_CODES[fault]}</Code><Message>by the test</Message></Error>".encode()
            start_response(f"{fault} {_CODES[fault]}", [("Content-Length", str(len(body)))])
            return [] if method == "HEAD" else [body]
        answer: Iterable[bytes] = self._app(environ, start_response)
        if fault == "cut answer":
            return _half(b"".join(answer))
        return answer


def _half(body: bytes) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    raise ConnectionAbortedError


@contextlib.contextmanager
def running_store() -> Iterator[FaultyStore]:
    """A store while the block runs."""
    from werkzeug.serving import WSGIRequestHandler, make_server  # this takes a second, as moto does

    class Handler(WSGIRequestHandler):
        def connection_dropped(self, error: BaseException, environ: dict[str, Any] | None = None) -> None:
            self.close_connection = True

        def log(self, type: str, message: str, *args: Any) -> None:
            return

    store = FaultyStore()
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=Handler)
    store.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    # Not mkdir: all servers of this process show what moto keeps for the process.
    fsspec.filesystem("s3", **store.options).makedirs(BUCKET, exist_ok=True)
    yield store
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyStore]:
    with running_store() as store:
        yield store


@pytest.fixture
def store(server: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    monkeypatch.setitem(fsspec.config.conf, "s3", server.options)
    server.clear()
    return server


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with files of several parts."""
    path = tmp_path_factory.mktemp("source") / "step_1"
    robust_dcp.save(large_state_dict(1.0), checkpoint_id=path)
    return path


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
    return f"s3://{BUCKET}/{name}/step_1"


@pytest.fixture
def environment(store: FaultyStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a job has in its environment for such a store."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
    monkeypatch.setenv("ROBUST_DCP_STAGING", str(tmp_path / "staging"))


def large_state_dict(value: float) -> dict[str, Any]:
    return {"one": torch.full((N_ITEMS // 2,), value), "two": torch.full((N_ITEMS // 2,), value)}


def options(**more: Any) -> CopyOptions:
    return CopyOptions(part_bytes=PART_NBYTES, **more)


def loaded_back(url: str, directory: Path) -> float:
    """Copied from the store and loaded: each byte is verified on the way."""
    copy_checkpoint(url, directory, options=options())
    found = large_state_dict(-1.0)
    robust_dcp.load(found, checkpoint_id=directory)
    (value,) = torch.cat([found["one"], found["two"]]).unique().tolist()
    return float(value)


def _copy_until_killed(source: str, url: str, store: dict[str, Any], pid: str) -> None:
    fsspec.config.conf["s3"] = store
    Path(pid).write_text(str(os.getpid()))
    copy_checkpoint(source, url, options=options(threads=1))


class TestS3:
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
        self, fault: Fault, method: str, part: str, large: Path, url: str, store: FaultyStore, tmp_path: Path
    ) -> None:
        store.fail(fault, method, part, times=2)
        copied = copy_checkpoint(large, url, options=options(threads=2))
        assert store.n_faults == 2
        assert copied.files == 5
        assert loaded_back(url, tmp_path / "back") == 1.0

    @pytest.mark.parametrize("part", ["", "partNumber=2"])
    def test_what_is_denied_is_not_tried_again(self, part: str, large: Path, url: str, store: FaultyStore) -> None:
        store.fail("403", "PUT", part, times=1000)
        with pytest.raises(StorageError, match=r"s3://.*PermissionError.*check the credentials.*not tried again"):
            copy_checkpoint(large, url, options=options(threads=1))
        assert store.n_faults == 1

    def test_a_copy_that_was_killed_goes_on_with_the_files_that_have_not_arrived(
        self, large: Path, url: str, store: FaultyStore, tmp_path: Path
    ) -> None:
        """Killed when all parts of the second file have arrived, and its upload is not over."""

        def kill(method: str, path: str) -> Fault | None:
            if method == "POST" and "uploadId" in path and "__0_1" in path:
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
                return "cut request"
            return None

        store.fault = kill
        (killed,) = run_ranks(1, _copy_until_killed, str(large), url, store.options, str(tmp_path / "pid"), init=False)
        assert killed.exitcode == -signal.SIGKILL
        store.clear()
        filesystem, root = fsspec.url_to_fs(url, **store.options)
        assert not filesystem.exists(f"{root}/.metadata")
        assert copy_checkpoint(large, url, options=options(threads=1)).skipped_files == 1
        assert not [path for method, path in store.requests if method == "PUT" and "__0_0" in path]
        assert loaded_back(url, tmp_path / "back") == 1.0

    def test_a_byte_that_is_flipped_in_the_store_is_found_and_sent_again(
        self, large: Path, url: str, store: FaultyStore, tmp_path: Path
    ) -> None:
        copy_checkpoint(large, url, options=options())
        filesystem, root = fsspec.url_to_fs(url, **store.options)
        name = f"{root}/{data_files(large)[1].name}"
        data = bytearray(filesystem.cat_file(name))
        data[len(data) // 2] ^= 1
        filesystem.pipe_file(name, bytes(data))
        for n_files in (1, 0):
            assert copy_checkpoint(large, url, options=options()).files == n_files
        assert loaded_back(url, tmp_path / "back") == 1.0


@pytest.mark.usefixtures("environment")
class TestSavesAndLoads:
    def test_a_load_by_url_reads_only_what_it_needs(self, large: Path, url: str, store: FaultyStore) -> None:
        copy_checkpoint(large, url)
        store.requests.clear()
        found = {"two": torch.zeros(N_ITEMS // 2)}
        report = robust_dcp.load(found, checkpoint_id=url)
        assert bool((found["two"] == 1.0).all()) and report.unverified_nbytes == 0
        read = {path.partition("?")[0] for method, path in store.requests if "distcp" in path and method == "GET"}
        assert len(read) == 1

    def test_ranks_save_to_a_url_and_load_from_it(self, url: str) -> None:
        outcome = values(run_ranks(2, _save_and_load, url))
        assert outcome == [(f"{url}_async", 2 * (1000.0 + 3), []), (f"{url}_async", 2 * (2000.0 + 3), [])]

    @pytest.mark.parametrize("how", [{}, {"layout": "safetensors"}, {"overwrite": False}])
    def test_a_save_whose_copy_has_failed_can_be_made_again(self, how: Any, url: str, store: FaultyStore) -> None:
        """What is staged there is nobody's checkpoint yet, so it gives way in either layout."""
        store.fail("403", "PUT", ".metadata", times=1)
        writer = robust_dcp.RobustWriter("not used", **how)
        with pytest.raises(StorageError, match=r"\.metadata"):
            robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=url, storage_writer=writer)
        robust_dcp.save({"w": torch.full((3,), 2.0)}, checkpoint_id=url, storage_writer=writer)
        found = {"w": torch.zeros(3)}
        robust_dcp.load(found, checkpoint_id=url)
        assert found["w"].tolist() == [2.0] * 3
        with pytest.raises(StorageError, match="there is another checkpoint at s3://"):
            robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=url)


def _save_and_load(url: str) -> tuple[str, float, list[str]]:
    rank = dist.get_rank()
    mine = {f"of_{rank}": torch.full((1000,), float(rank + 1)), "all": torch.ones(3)}
    robust_dcp.save(mine, checkpoint_id=url)
    report = robust_dcp.async_save(mine, checkpoint_id=f"{url}_async").result()
    total = 0.0
    for place in (url, f"{url}_async"):
        found = {name: torch.zeros_like(each) for name, each in mine.items()}
        robust_dcp.load(found, checkpoint_id=place)
        total += float(sum(each.sum() for each in found.values()))
    return report.checkpoint_id, total, os.listdir(os.environ["ROBUST_DCP_STAGING"])


def test_what_a_store_does_not_list_is_not_taken_for_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists may be old. And fsspec's ``find`` gives none if one could not be had."""
    url, lists, errors = f"memory://{tmp_path.name}/step_1", MemoryFileSystem.ls, [ConnectionError]
    copied = copy_checkpoint(save(tmp_path / "source"), url)

    def bad(*place: Any, **more: Any) -> Any:
        if errors:
            raise errors.pop()
        return [each for each in lists(*place, **more) if ".metadata" not in each["name"]]

    monkeypatch.setattr(MemoryFileSystem, "ls", bad)
    monkeypatch.setattr(MemoryFileSystem, "find", fsspec.spec.AbstractFileSystem.find)  # that of most stores
    assert copy_checkpoint(url, tmp_path / "back").files == copied.files
    with pytest.raises(StorageError, match="there is another checkpoint at memory://"):
        copy_checkpoint(save(tmp_path / "another", 2.0), url)


def refused(data: bytes) -> bytes:
    raise ConnectionError


def flipped(data: bytes) -> bytes:
    return data[:2000] + bytes([data[2000] ^ 1]) + data[2001:]


@pytest.mark.parametrize(
    ("part", "change", "times", "expected"),
    [
        ("__0_0", flipped, 2, r"\.distcp is not .* \d+ bytes with CRC-32 .*, found .*with CRC-32.*; it was sent"),
        ("__0_0", flipped, 1, None),
        ("__0_0", refused, 2, r"send memory://.*ConnectionError.* after 2 tries"),
        ("/.metadata", lambda data: data[:9], 1, r"\.metadata is not as it was sent: expected \d+ bytes"),
    ],
)
def test_a_file_that_arrives_otherwise_than_it_was_sent_is_sent_once_more_and_then_named(
    part: str, change: Callable[[bytes], bytes], times: int, expected: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    """But for ``.metadata``, with which the copy would be committed. After all this it can be made again."""
    source, url, changed = save(tmp_path / "source"), f"memory://{tmp_path.name}/step_1", list[str]()
    works, kind = MemoryFileSystem.pipe_file, StorageError if change is refused else CorruptCheckpoint

    def disturbed(self: Any, path: str, data: bytes, **more: Any) -> None:
        is_changed = part in path and len(changed) < times
        changed.extend([path] * is_changed)
        works(self, path, change(data) if is_changed else data, **more)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", disturbed)
    with contextlib.nullcontext() if expected is None else pytest.raises(kind, match=expected):
        copy_checkpoint(source, url, options=ONE_THREAD)
    assert len(changed) == times
    copy_checkpoint(source, url)
    assert loaded(url) == 1.0
