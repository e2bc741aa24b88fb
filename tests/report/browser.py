"""Headless Chromium driven over its debugging pipe with the standard library alone."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def binary() -> str | None:
    """Path of a browser, if one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A page that records what it logs, throws and asks the network for."""

    def __init__(self, limit: float = 60.0) -> None:
        self.limit, self.counter = limit, 0
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        self.buffer = b""

    def __enter__(self) -> "Browser":
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = (
            f"--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
            f"--disable-background-networking --hide-scrollbars --remote-debugging-pipe "
            f"--user-data-dir={self.profile.name}"
        )
        # The pipe must be file descriptors 3 and 4 of the browser.
        shell = f'exec "$0" {flags} about:blank 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, str(binary())],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=10)
        os.close(self.into)
        os.close(self.out)
        self.profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self.counter += 1
        number = self.counter
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + self.limit
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.into], [], [], max(end - time.monotonic(), 0))
            chunk = os.read(self.into, 1 << 20) if ready else b""
            assert chunk, "the browser does not answer"
            self.buffer += chunk
        first, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(first)

    def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        """Set the window's size in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=mobile,
        )  # fmt: skip

    def scheme(self, name: str, media: str = "screen") -> None:
        """Ask the page for its light or dark colours, on the screen or in print."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def open(self, path: Path) -> None:
        """Open a file and wait until it is there."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self.run("document.readyState") != "complete":
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def key(self, name: str, code: int) -> None:
        """Press and release a key."""
        text = "\r" if name == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind, key=name, windowsVirtualKeyCode=code, **({"text": text} if text else {}),
            )  # fmt: skip

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save what is seen, or the whole page, as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def print(self, path: Path) -> None:
        """Save the page as PDF."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF")["data"]))

    def complaints(self) -> list[str]:
        """Everything logged as an error or warning, thrown or blocked so far."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"]["text"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Addresses asked for so far."""
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]
