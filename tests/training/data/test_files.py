import hashlib
import multiprocessing
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from transformer_kernels.training.data.files import DataFileError, fetch, numbered_folder, write_atomically

CONTENT = b"some data\n" * 100
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """/good, /bad (one byte flipped), /large, /short (fewer bytes than announced), /silent and /trickle."""

    def do_GET(self):
        self.server.requests += 1
        body = {"/bad": b"S" + CONTENT[1:], "/large": CONTENT * 9}.get(self.path, CONTENT)
        if self.path == "/missing":
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.path == "/silent":
            return time.sleep(2)
        if self.path == "/trickle":
            return self.trickle(body)
        return self.wfile.write(body[:50] if self.path == "/short" else body)

    def trickle(self, body):
        for byte in body:
            try:
                self.wfile.write(bytes([byte]))
            except OSError:
                return
            time.sleep(0.05)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = 0
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def get(server, name, path, timeout=5.0):
    url = f"http://127.0.0.1:{server.server_address[1]}{name}"
    return fetch(url, path, SHA256, max_bytes=len(CONTENT), remedy="look elsewhere", timeout=timeout)


def kept(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_file_is_downloaded_once(server, tmp_path):
    path = tmp_path / "file"
    assert get(server, "/good", path) == CONTENT == get(server, "/good", path)
    assert server.requests == 1
    assert kept(tmp_path) == ["file"]


def test_a_damaged_file_in_the_cache_is_fetched_again(server, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"half")
    assert get(server, "/good", path) == CONTENT == path.read_bytes()


@pytest.mark.parametrize(
    "name, message",
    [
        ("/bad", f"expected SHA-256 {SHA256}, got {hashlib.sha256(b'S' + CONTENT[1:]).hexdigest()}"),
        ("/large", "more than the 1000 bytes expected"),
        ("/short", "50 of 1000 bytes|IncompleteRead|not complete"),
        ("/missing", "404"),
        ("/silent", "timed out"),
        ("/trickle", "not complete after 0.5 s"),
    ],
)
def test_a_bad_download_leaves_nothing_behind(server, tmp_path, name, message):
    start = time.monotonic()
    with pytest.raises(DataFileError, match=message) as error:
        get(server, name, tmp_path / "file", timeout=0.5)
    assert f"http://127.0.0.1:{server.server_address[1]}{name}" in str(error.value)
    assert "look elsewhere" in str(error.value)
    assert kept(tmp_path) == []
    assert time.monotonic() - start < 5


def test_two_processes_at_once_download_once(server, tmp_path):
    url = f"http://127.0.0.1:{server.server_address[1]}/good"
    task = {"url": url, "path": tmp_path / "file", "sha256": SHA256, "max_bytes": 1000, "remedy": ""}
    both = [multiprocessing.get_context("fork").Process(target=fetch, kwargs=task) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=60)
    assert [process.exitcode for process in both] == [0, 0]
    assert server.requests == 1


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert kept(tmp_path) == ["file"]


def test_a_folder_that_another_process_makes_meanwhile_is_not_taken(tmp_path, monkeypatch):
    mkdir, name = Path.mkdir, tmp_path / "runs" / "run"

    def outrun(path, *arguments, **options):
        if path == name:
            os.makedirs(path, exist_ok=True)
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", outrun)
    assert [numbered_folder(str(name)).name for _ in range(2)] == ["run-2", "run-3"]
