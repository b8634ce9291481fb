"""An S3 server on this machine, and a proxy before it that cuts connections, or answers with errors.

The server is moto's, a process of its own. The proxy is a thread: a test tells it what shall happen to which request.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import fsspec

__all__ = ["BUCKET", "Fault", "FaultyProxy", "faulty_proxy", "options_for", "s3_server"]

BUCKET = "bucket"

Fault = Literal["cut request", "cut answer", "500", "503", "403"]

_STARTED_WITHIN_SECONDS = 60.0


def options_for(endpoint: str) -> dict[str, Any]:
    """What fsspec passes to s3fs for a server here. The client itself repeats nothing: that is what is tested."""
    return {
        "key": "testing",
        "secret": "testing",
        "endpoint_url": endpoint,
        "skip_instance_cache": True,
        "config_kwargs": {"retries": {"max_attempts": 0}, "read_timeout": 5, "connect_timeout": 5},
    }


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a server with one empty bucket. It is ended after the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        _wait_for(port, server)
        fsspec.filesystem("s3", **options_for(endpoint)).mkdir(BUCKET)
        yield endpoint
    finally:
        server.kill()
        server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    ends_at = time.monotonic() + _STARTED_WITHIN_SECONDS
    while time.monotonic() < ends_at and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        threading.Event().wait(0.05)
    raise RuntimeError(f"moto.server does not answer on port {port} (exit code {server.poll()})")


@dataclass
class FaultyProxy:
    """A proxy that passes requests on, or not.

    Attributes:
        endpoint: its URL.
        fault: asked for each request, by method and path; what it returns happens.
        requests: method and path of each request, in order.
        n_faults: how many were not just passed on.
    """

    endpoint: str = ""
    fault: Callable[[str, str], Fault | None] = lambda method, path: None
    requests: list[tuple[str, str]] = field(default_factory=list)
    n_faults: int = 0

    def fail(self, fault: Fault, method: str, part: str, *, times: int) -> None:
        """Let the next ``times`` requests of a method, whose path holds ``part``, end in a fault."""
        left = [None] * times
        lock = threading.Lock()

        def decide(its_method: str, path: str) -> Fault | None:
            with lock:
                if its_method == method and part in path and left:
                    left.pop()
                    return fault
                return None

        self.fault = decide


@contextmanager
def faulty_proxy(endpoint: str) -> Iterator[FaultyProxy]:
    """A proxy before a server, until the block ends."""
    proxy = FaultyProxy()
    host = endpoint.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: Any) -> None:
            return

        def _pass_on(self) -> None:
            proxy.requests.append((self.command, self.path))
            fault = proxy.fault(self.command, self.path)
            proxy.n_faults += fault is not None
            length = int(self.headers.get("Content-Length") or 0)
            if fault == "cut request":
                self.rfile.read(length // 2)
                self._cut()
                return
            body = self._body(length)
            if fault in ("500", "503", "403"):
                self._refuse(int(fault))
                return
            connection = http.client.HTTPConnection(host, timeout=30)
            # s3fs signs the name of the proxy; moto does not check signatures.
            headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            size = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", size or "0")
            self.end_headers()
            if fault == "cut answer":
                self.wfile.write(data[: len(data) // 2])
                self._cut()
                return
            self.wfile.write(data)
            connection.close()

        def _body(self, length: int) -> bytes:
            if (self.headers.get("Transfer-Encoding") or "").lower() != "chunked":
                return self.rfile.read(length)
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _refuse(self, status: int) -> None:
            code = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}[status]
            data = f"<Error><Code>{code}</Code><Message>by the proxy</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _cut(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

    for method in ("GET", "PUT", "POST", "HEAD", "DELETE"):
        setattr(Handler, f"do_{method}", Handler._pass_on)

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            return  # clients that hang up are what this is for

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
