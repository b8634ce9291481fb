"""An S3 server in this process (moto's), which cuts connections or answers with errors when a test tells it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import fsspec

BUCKET = "bucket"

Fault = Literal["cut request", "cut answer", "500", "503", "403"]

_CODES = {"403": "AccessDenied", "500": "InternalError", "503": "SlowDown"}


class FaultyStore:
    """A server with one empty bucket.

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
            return [body]
        answer: Iterable[bytes] = self._app(environ, start_response)
        if fault == "cut answer":
            return _half(b"".join(answer))
        return answer


def _half(body: bytes) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    raise ConnectionAbortedError


@contextmanager
def faulty_store() -> Iterator[FaultyStore]:
    """A server with one empty bucket. It is ended after the block."""
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
    try:
        fsspec.filesystem("s3", **store.options).mkdir(BUCKET)
        yield store
    finally:
        server.shutdown()
        thread.join()
