"""Headless Chromium over its DevTools protocol, for whoever has it: `chromium()` says."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Return the program, if it and the library that talks to it are here."""
    try:
        import websockets.sync.client  # noqa: F401
    except ImportError:
        return None
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextlib.contextmanager
def page(width: int = 1400, height: int = 1000, dark: bool = False) -> Iterator["Page"]:
    """Open a browser with one empty page."""
    import websockets.sync.client

    program = chromium()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        flags = [
            *("--headless=new", "--no-sandbox", "--remote-debugging-port=0", "--disable-gpu"),
            *(f"--user-data-dir={home}", f"--window-size={width},{height}", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        ]
        process = subprocess.Popen([program, *flags, "about:blank"], stderr=subprocess.DEVNULL)
        try:
            port = _port(Path(home))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                target = next(one for one in json.load(answer) if one["type"] == "page")
            address = target["webSocketDebuggerUrl"]
            with websockets.sync.client.connect(address, max_size=None) as socket:
                yield Page(socket, width, height, dark)
        finally:
            process.terminate()
            process.wait()


def _port(home: Path) -> int:
    file = home / "DevToolsActivePort"
    for _ in range(300):
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int(file.read_text().splitlines()[0])
        time.sleep(0.1)
    raise TimeoutError("the browser has not begun")


class Page:
    """A page of the browser, and what it said and asked for."""

    def __init__(self, socket: Any, width: int, height: int, dark: bool) -> None:
        self.socket, self._ids = socket, itertools.count(1)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._ids)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=120))
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return dict(answer["result"])
            self._heard(answer)

    def _heard(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(params["args"]))

    def run(self, script: str) -> Any:
        """Return what a script, or its promise, gives."""
        options = {"awaitPromise": True, "returnByValue": True}
        result = self.call("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def open(self, address: str, seconds: float = 60) -> float:
        """Go to an address; return the seconds until the page says that it is drawn."""
        begun = time.perf_counter()
        self.call("Page.navigate", url=address)
        self.wait("document.body && document.body.dataset.ready === 'true'", seconds)
        return time.perf_counter() - begun

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Wait until a condition is true."""
        end = time.perf_counter() + seconds
        while not self.run(condition):
            if time.perf_counter() > end:
                raise TimeoutError(f"{condition}: {self.complaints}")
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def screenshot(self, path: Path, whole: bool = False) -> Path:
        """Write what the page looks like, as far as it is in the window or whole."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))
        return path
