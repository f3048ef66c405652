"""Every exhibit in every backend; `python -m tests.museum.test_museum` writes the page, PyTorch's own beside them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.museum.exhibits import EXHIBITS, Exhibit
from tests.support.parity import require

CPU = torch.device("cpu")
PAGE = Path(__file__).with_name("README.md")


@pytest.mark.parametrize("backend", tk.BACKENDS)
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_does_not_happen_here(exhibit: Exhibit, backend: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("the exhibits are on the CPU, through the interpreter and the emulation")
    require("attention" if exhibit.of_attention else "cross_entropy", backend, CPU, torch.float32)
    ops: Any = tk.bind(backend)
    exhibit.check(ops.attention if exhibit.of_attention else ops)


def test_the_page_lists_every_exhibit() -> None:
    page = PAGE.read_text()
    assert all(exhibit.name.replace("_", " ") in page for exhibit in EXHIBITS)
    assert len({thread for exhibit in EXHIBITS for thread in exhibit.threads}) >= 30


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """PyTorch's attention as its documentation says that it is to be called."""
    mask = attn_bias if key_padding_mask is None else key_padding_mask[:, None, None, :]
    if causal and mask is not None:
        triangle = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask, causal = mask.masked_fill(~triangle, -torch.inf), False
    grouped = q.shape[1] != k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, is_causal=causal, enable_gqa=grouped
    )


def verdict(exhibit: Exhibit) -> str:
    """Of PyTorch's attention; it has nothing to compare the other operations with."""
    if not exhibit.of_attention:
        return ""
    try:
        exhibit.check(sdpa)
    except (AssertionError, RuntimeError) as error:
        return "fails" if isinstance(error, AssertionError) else "refuses"
    return "passes"


def write_page() -> None:
    lines = [
        "# The museum",
        "",
        "Failures that users reported publicly of other packages, each as a test (`exhibits.py`) that every backend",
        f"passes, and the attention of PyTorch {torch.__version__} on a CPU beside them, called as documented.",
        "Threads may be about a GPU, or mended since; causal alignment with unequal lengths is a choice.",
        "",
        "| what happened | reported in | PyTorch, CPU |",
        "| --- | --- | --- |",
    ]
    for exhibit in EXHIBITS:
        threads = ", ".join(
            f"[{thread}](https://github.com/{thread.replace('#', '/issues/')})" for thread in exhibit.threads
        )
        name = exhibit.name.replace("_", " ")
        lines.append(f"| **{name}.** {exhibit.sentence} | {threads} | {verdict(exhibit)} |")
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(write_page())
