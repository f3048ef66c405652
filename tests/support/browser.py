"""A page in headless Chromium with real mouse events: the DevTools protocol over two pipes, without other packages."""

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest

FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe --window-size=1200,900"
PATIENCE = 60.0  # seconds per response, on a busy machine


class Page:
    """The one page of a browser."""

    def __init__(self, reading, writing):
        self._reading, self._writing = reading, writing
        self._numbers, self._unread, self._session = itertools.count(1), b"", ""

    def call(self, method, **parameters):
        """The result of one command of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        os.write(self._writing, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode())
        os.write(self._writing, b"\0")
        while (response := self._next()).get("id") != number:
            pass
        assert "error" not in response, response
        return response["result"]

    def open(self, url):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Network.enable")
        network = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.call("Network.emulateNetworkConditions", **network)
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + PATIENCE
        while self.value("document.readyState") != "complete" or self.value("location.href") == "about:blank":
            assert time.monotonic() < deadline, "the page does not load"

    def value(self, expression):
        """The value of a JavaScript expression on the page."""
        response = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

    def mouse(self, selector, *, click=True, shift=(0.0, 0.0)):
        """Move the mouse to the middle of an element, shifted by pixels, and click there."""
        middle = self.value(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
        )
        middle = {"x": middle["x"] + shift[0], "y": middle["y"] + shift[1]}
        kinds = ("mouseMoved", "mousePressed", "mouseReleased") if click else ("mouseMoved",)
        for kind in kinds:
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **middle, **button)

    def resize(self, width, height, *, phone=False):
        """The size of the page in CSS pixels; a phone has touch and a dense screen."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **sizes)

    def _next(self):
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._reading], [], [], PATIENCE)
            received = os.read(self._reading, 1 << 16) if ready else b""
            assert received, "no response from the browser"
            self._unread += received
        message, self._unread = self._unread.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def opened(path, profile):
    """The page of an HTML file, without a network; skips if Chromium is not installed."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None or shutil.which("bash") is None:
        pytest.skip("no Chromium: install the Debian package chromium")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    command = f"exec {chromium} {FLAGS} --user-data-dir={profile} 3<&{theirs_in} 4>&{theirs_out}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(["bash", "-c", command], pass_fds=(theirs_in, theirs_out), **quiet)
    os.close(theirs_in), os.close(theirs_out)
    page = Page(ours_in, ours_out)
    try:
        page.open(path.resolve().as_uri())
        yield page
    finally:
        process.terminate()
        process.wait(PATIENCE)
        os.close(ours_in), os.close(ours_out)
