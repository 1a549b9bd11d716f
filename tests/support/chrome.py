"""A headless Chromium driven over the DevTools protocol: what the report's tests need of it, and no package for it.

The WebSocket client is the one that Jupyter brings."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)


def find_chromium() -> str | None:
    """Path of an installed Chromium or Chrome, or ``None``."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chrome:
    """One page of one browser, with the network off. Use as a context manager.

    ``requests`` and ``errors`` collect what the page asked for and what went wrong, since the last :meth:`open`."""

    def __init__(self, binary: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        command = [binary, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._numbers = itertools.count(1)
        self.requests: list[str] = []
        self.errors: list[str] = []

    def __enter__(self) -> Chrome:
        port = self._wait_for_port()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=20) as answer:
            pages = json.load(answer)
        address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
        self._socket = websocket.create_connection(address, timeout=60)
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.send(f"{domain}.enable")
        offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.send("Network.emulateNetworkConditions", **offline)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(timeout=20)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _wait_for_port(self) -> int:
        path = Path(self._profile, "DevToolsActivePort")
        for _ in range(600):
            if path.is_file() and (lines := path.read_text(encoding="utf-8").splitlines()):
                return int(lines[0])
            if self._process.poll() is not None:
                raise RuntimeError(f"Chromium ended with exit code {self._process.returncode}")
            time.sleep(0.1)
        raise RuntimeError("Chromium did not open its debugging port within a minute")

    def send(self, method: str, **parameters: Any) -> dict:
        """A command and its result; events that come meanwhile are noted."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._note(message)

    def _note(self, message: dict) -> None:
        kind, details = message.get("method"), message.get("params", {})
        if kind == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif kind == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(details["exceptionDetails"])[:500])
        elif kind == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(details["args"])[:500])
        elif kind == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.errors.append(details["entry"]["text"])

    def open(self, path: Path, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Load a local file at a window size and wait until it is complete."""
        self.requests.clear()
        self.errors.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Page.navigate", url=path.resolve().as_uri())
        for _ in range(300):
            if self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
                return
            time.sleep(0.1)
        raise RuntimeError(f"{path} did not load within half a minute")

    def run(self, expression: str) -> Any:
        """Value of a JavaScript expression (promises are awaited). Raises ``RuntimeError`` with what it threw."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:800])
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """One key: Tab, Enter, ArrowRight, ..."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **(text if kind == "keyDown" else {}),
            )

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
