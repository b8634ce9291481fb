"""A headless Chromium, driven over its DevTools protocol: it opens a page, and says what the page did."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--remote-allow-origins=*", "--hide-scrollbars", "about:blank"),
)


class Page:
    """One tab of the browser.

    Attributes:
        complaints: what the page has written to its console, and exceptions that nobody caught.
        requests: the URLs that it has asked for.
    """

    def __init__(self, url: str) -> None:
        self._socket = websocket.create_connection(url, timeout=60)
        self._number = 0
        self.complaints: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and note the events that arrive meanwhile."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message.get("method", ""), message.get("params", {}))

    def close(self) -> None:
        self._socket.close()

    def _note(self, event: str, told: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(told["args"]))
        elif event == "Log.entryAdded":
            self.complaints.append(told["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def show(self, file: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Open a file in a window of this size, on a system that prefers these colours."""
        self.complaints, self.requests = [], []
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=file.as_uri())
        self.value(
            """new Promise((resolve) => {
              const look = () => document.documentElement && document.documentElement.dataset.ready === "yes" &&
                location.href !== "about:blank" ? requestAnimationFrame(() => requestAnimationFrame(resolve))
                : setTimeout(look, 20);
              look();
            })"""
        )

    def value(self, expression: str) -> Any:
        """What an expression gives in the page. A promise is waited for."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(json.dumps(told["exceptionDetails"]))
        return told["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text="\r" if key == "Enter" else "")


@contextmanager
def browser() -> Iterator[Page]:
    """A new browser with an empty profile. It ends with the block."""
    program = next((found for found in map(shutil.which, NAMES) if found), None)
    if program is None:
        raise RuntimeError(f"none of {', '.join(NAMES)} is installed: apt-get install -y chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, _started(program, profile) as process:
        try:
            with closing(Page(_tab_of(process))) as page:
                yield page
        finally:
            process.kill()


def _started(program: str, profile: str) -> subprocess.Popen[str]:
    command = [program, *FLAGS[:-1], f"--user-data-dir={profile}", FLAGS[-1]]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def _tab_of(process: subprocess.Popen[str]) -> str:
    """The address of the browser's first tab."""
    assert process.stderr is not None
    line = next(line for line in process.stderr if "DevTools listening on" in line)
    port = line.split("127.0.0.1:")[1].split("/")[0]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/json/list") as answer:
        tabs = json.load(answer)
    return next(str(tab["webSocketDebuggerUrl"]) for tab in tabs if tab["type"] == "page")
