"""Throughput, memory and padding of a run, and its log."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from transformer_kernels.backends.triton import fp32_precision
from transformer_kernels.training._optional import require
from transformer_kernels.training.data.files import naming

# Dense peak FLOP/s of the matrix units, from the vendors' data sheets: (float32 with TF32 off, bfloat16 and float16).
# TF32 has half the rate of bfloat16 on all of them.
PEAK_FLOPS = {
    "H200": (67e12, 989e12),
    "H100 PCIe": (51e12, 756e12),
    "H100": (67e12, 989e12),
    "A100": (19.5e12, 312e12),
    "L40S": (91.6e12, 362e12),
    "L4": (30.3e12, 121e12),
    "A10": (31.2e12, 125e12),
    "RTX 4090": (82.6e12, 165e12),
    "RTX 3090": (35.6e12, 71e12),
}


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The device's peak FLOP/s for this precision; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for key, (float32, half) in PEAK_FLOPS.items():
        if key in name.split("NVIDIA ")[-1]:
            tf32 = half / 2
            if dtype == "float32":
                return tf32 if fp32_precision() == "tf32" else float32
            return tf32 if dtype == "tf32" else half
    return None


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: PyTorch's count on a GPU, else the resident set of the process; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # the module does not exist on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Stopwatch:
    """Tokens and seconds of training steps; the first step, which compiles, is counted separately."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running_since = 0.0
        self._unread_tokens = self._unread_steps = 0
        self.first_step_seconds: float | None = None
        self.tokens = self.steps = 0
        self.seconds = 0.0

    def start(self) -> None:
        """Start counting time."""
        self._synchronise()
        self._running_since = time.perf_counter()

    def add_step(self, tokens: int) -> None:
        """Count a launched step over `tokens`."""
        if self.first_step_seconds is None:
            self._synchronise()
            self.first_step_seconds = time.perf_counter() - self._running_since
            self.start()
        else:
            self._unread_tokens += tokens
            self._unread_steps += 1

    def pause(self) -> float:
        """Stop counting time; returns the tokens per second since the start."""
        self._synchronise()
        seconds, tokens = time.perf_counter() - self._running_since, self._unread_tokens
        if self._unread_steps:
            self.tokens += tokens
            self.steps += self._unread_steps
            self.seconds += seconds
        self._unread_tokens = self._unread_steps = 0
        return tokens / seconds if seconds > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all steps after the first."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def compile_seconds(self) -> float:
        """Time of the first step in excess of the average of the later ones."""
        usual = self.seconds / self.steps if self.steps else 0.0
        return max(0.0, (self.first_step_seconds or 0.0) - usual)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Padding:
    """The fraction of computed positions that are padding."""

    def __init__(self) -> None:
        self._tokens = self._positions = 0
        self._read_tokens = self._read_positions = 0

    def add(self, tokens: int, positions: int) -> None:
        """Count a batch of `positions`, of which `tokens` are real."""
        self._tokens += tokens
        self._positions += positions

    @property
    def fraction(self) -> float:
        """The fraction over all batches so far."""
        return 1.0 - self._tokens / self._positions if self._positions else 0.0

    def since_last_read(self) -> float:
        """The fraction over the batches since the last call."""
        tokens, positions = self._tokens - self._read_tokens, self._positions - self._read_positions
        self._read_tokens, self._read_positions = self._tokens, self._positions
        return 1.0 - tokens / positions if positions else 0.0


class RunLog:
    """Writes one JSON object per line to log.jsonl, and TensorBoard events if requested."""

    def __init__(self, folder: Path, tensorboard: bool = False) -> None:
        self._writer = None
        if tensorboard:
            require("tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"))
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / "log.jsonl", "a+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._file.seek(0)
        if (before := self._file.read()) and not before.endswith("\n"):  # cut by a full disk or a kill
            self._file.write("\n")

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append a line; numbers also become TensorBoard scalars named <event>/<name>."""
        with naming(self._file.name):
            self._file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
            self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        with naming(self._file.name):
            self._file.close()
        if self._writer is not None:
            self._writer.close()
