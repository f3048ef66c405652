"""Verified downloads, atomic writes, locks, numbered folders, and a check of texts."""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

CHUNK = 1 << 16


class DataFileError(RuntimeError):
    """A data or vocabulary file is unavailable, or its hash is wrong."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock `path` with a file beside it, so that one process writes it and the others read it complete."""
    from filelock import FileLock  # a dependency of torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        yield


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add `path` to an OSError without a file name, as raised by write and fsync (disk full, I/O error)."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_synced(path: Path, data: bytes) -> None:
    """Write `data` to `path` and flush it to disk."""
    with naming(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to a temporary name, flush it to disk, then rename it to `path`."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    os.close(descriptor)
    try:
        write_synced(Path(temporary), data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def numbered_folder(name: str) -> Path:
    """Create and return the folder `name`, or the first of name-2, name-3, ... that does not exist."""
    for number in itertools.count(1):
        folder = Path(name if number == 1 else f"{name}-{number}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError


def check_hash(path: str | Path, data: bytes, sha256: str, remedy: str) -> None:
    """Raise DataFileError unless the SHA-256 of `data`, read from `path`, matches."""
    actual = hashlib.sha256(data).hexdigest()
    if actual != sha256:
        raise DataFileError(f"{path}: expected SHA-256 {sha256}, got {actual} ({len(data)} bytes); {remedy}")


def fetch(url: str, path: Path, sha256: str, *, max_bytes: int, remedy: str, timeout: float = 60.0) -> bytes:
    """The bytes of `path`, downloaded from `url` if the file is missing or its hash is wrong.

    `timeout`, in seconds, limits both a stalled connection and the whole download.
    """
    with locked(path):
        if path.exists() and hashlib.sha256(data := path.read_bytes()).hexdigest() == sha256:
            return data
        path.unlink(missing_ok=True)
        data = _download(url, path, max_bytes, remedy, timeout)
        check_hash(url, data, sha256, f"nothing was kept; {remedy}")
        write_atomically(path, data)
        return data


def _download(url: str, path: Path, max_bytes: int, remedy: str, timeout: float) -> bytes:
    deadline = time.monotonic() + timeout
    received = bytearray()
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            while chunk := response.read1(CHUNK):
                received += chunk
                if len(received) > max_bytes:
                    raise DataFileError(f"{url}: more than the {max_bytes} bytes expected; nothing was kept; {remedy}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not complete after {timeout:g} s")
            announced = response.headers.get("Content-Length")
            if announced is not None and len(received) != int(announced):
                raise TimeoutError(f"the connection ended after {len(received)} of {announced} bytes")
    except (OSError, HTTPException) as error:
        raise DataFileError(f"cannot download {url} to {path}: {error}; {remedy}") from error
    return bytes(received)


def is_unicode(text: str) -> bool:
    """False for a lone surrogate, as of an undecodable byte or of an escape in JSON, which no tokenizer encodes."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
