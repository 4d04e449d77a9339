"""One headless Chromium, driven through its debugging pipe with nothing but the standard library.

Knows pages, not what they should hold. The pipe is file descriptors 3 (to the browser) and 4 (from it); messages are JSON
ended by a NUL. No port is opened.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Return the browser on PATH, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Visit:
    """What happened while a page loaded.

    Attributes:
        requests: every address that the page asked for, its own file included.
        errors: messages of the console and exceptions.
    """

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Chromium:
    """A browser with one page; `close` ends it and waits for it."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        script = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", program, *arguments],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self._visit = Visit()
        self._loaded = False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def visit(self, address: str, *, width: int, scheme: str) -> Visit:
        """Load `address` in a window of `width` pixels with the colour scheme "light" or "dark"."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self._visit, self._loaded = Visit(), False
        self._call("Page.navigate", url=address)
        deadline = time.monotonic() + 60
        while not self._loaded:
            self._receive(deadline, f"the load event of {address}")
        self.evaluate("0")  # what the page did until now has been told when this is answered
        return self._visit

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG file."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser."""
        os.close(self._write)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(timeout=20)
        os.close(self._read)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._receive(deadline, f"the answer to {method}")
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self, deadline: float, awaited: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self._read], [], [], left)[0]
            assert ready, f"Chromium did not send {awaited} in time"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, f"Chromium ended while {awaited} was awaited"
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self._visit.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self._visit.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self._visit.errors.append(str(params["args"]))
            case "Log.entryAdded":
                self._visit.errors.append(str(params["entry"]["text"]))
