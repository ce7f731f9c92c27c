"""A headless Chromium, driven over WebDriver: what a page shows, asks for and complains of."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import json
import shutil
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 60
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars"),
)


def missing() -> str:
    """Returns why there is no browser to test with; empty if there is one."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(lacking)} on this machine" if lacking else ""


@dataclass(frozen=True, slots=True)
class Browser:
    """A window.

    Attributes:
        session: address of the WebDriver session.
    """

    session: str

    def open(self, url: str) -> None:
        """Loads a page; returns when it has loaded."""
        _post(f"{self.session}/url", {"url": url})

    def resize(self, width: int, height: int = 900) -> None:
        """Gives the page so many pixels of CSS."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        _post(f"{self.session}/goog/cdp/execute", command)

    def run(self, script: str) -> Any:
        """Returns what a script returns, called in the page."""
        return _post(f"{self.session}/execute/sync", {"script": script, "args": []})

    def wait_for(self, selector: str) -> None:
        """Returns when an element is there; an HTTPError says that it did not come."""
        _post(f"{self.session}/timeouts", {"implicit": 1000 * SECONDS // 2})
        _post(f"{self.session}/element", {"using": "css selector", "value": selector})

    def complaints(self) -> list[str]:
        """Returns the errors and warnings of the console since the last call."""
        return [entry["message"] for entry in _post(f"{self.session}/se/log", {"type": "browser"})]

    def screenshot(self) -> bytes:
        """Returns the window as PNG."""
        with urllib.request.urlopen(f"{self.session}/screenshot", timeout=SECONDS) as answer:
            return base64.b64decode(json.load(answer)["value"])


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Starts a browser with a new profile, and ends it."""
    with tempfile.TemporaryDirectory() as profile:
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        try:
            port = next(
                line.rsplit(" ", 1)[1].strip(". \n")
                for line in driver.stdout or ()
                if "started successfully on port" in line
            )
            options = {
                "goog:chromeOptions": {"args": [*ARGUMENTS, f"--user-data-dir={profile}"]},
                "goog:loggingPrefs": {"browser": "WARNING"},
            }
            answer = _post(
                f"http://127.0.0.1:{port}/session", {"capabilities": {"alwaysMatch": options}}
            )
            session = f"http://127.0.0.1:{port}/session/{answer['sessionId']}"
            try:
                yield Browser(session)
            finally:
                request = urllib.request.Request(session, method="DELETE")
                urllib.request.urlopen(request, timeout=SECONDS).close()
        finally:
            driver.terminate()
            driver.wait(SECONDS)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on this machine, and yields the address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def _post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)["value"]
