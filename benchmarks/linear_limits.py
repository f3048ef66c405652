"""Measure up to which weights the CPU's linear kernels are faster than PyTorch's products.

    python -m benchmarks.linear_limits            print this processor's entries of LIMITS in ops/linear/_cpu.py
    python -m benchmarks.linear_limits --write    and replace them there

Minimum CPU time of interleaved calls of one thread. Weights grow by factors of two up to the first at which PyTorch's
products are faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from transformer_kernels.ops.linear import LinearCall, LinearResult, _cpu
from transformer_kernels.ops.linear._products import gradients, product

ROWS = (8, 32, 128, 512, 2048)
EXPONENTS = range(14, 27)
"""Elements of a weight, as powers of two."""
CALLS = 7
PRODUCTS = {"all": (torch.float32, torch.bfloat16), "weight gradient": (torch.bfloat16,)}

Limits = dict[tuple[torch.dtype, str, str], tuple[tuple[int, int], ...]]
Call = Callable[[], object]


def pair(dtype: torch.dtype, products: str, M: int, N: int, K: int) -> tuple[Call, Call]:
    """Our products of x (M, K) with a weight (N, K), and PyTorch's."""
    x, weight, dy = (torch.randn(shape, dtype=dtype) for shape in ((M, K), (N, K), (M, N)))
    bias, wanted, result = torch.randn(N, dtype=dtype), (True, True, True), LinearResult(dy, dy)
    call = LinearCall(x, weight, bias, None)
    ours = _cpu.Products(call)
    if products == "weight gradient":
        return (
            lambda: ours.weight_gradient(x, weight, bias, dy, wanted),
            lambda: gradients(call, dy, (False, True, True)),
        )
    return (
        lambda: (ours.forward(call), ours.backward(call, result, (dy,), wanted)),
        lambda: (product(call, bias), gradients(call, dy, wanted)),
    )


def gain(dtype: torch.dtype, products: str, rows: int, exponent: int) -> float:
    """PyTorch's time over ours, for a tall and a wide weight of 2^exponent elements."""
    columns = 1 << exponent // 2 - 1
    totals = [0.0, 0.0]
    for N, K in ((columns, (1 << exponent) // columns), ((1 << exponent) // columns, columns)):
        calls = pair(dtype, products, rows, N, K)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(CALLS):
            for call, taken in zip(calls, times, strict=True):
                start = time.process_time()
                call()
                taken.append(time.process_time() - start)
        totals = [total + min(taken) for total, taken in zip(totals, times, strict=True)]
    return totals[1] / totals[0]


def measured(dtype: torch.dtype, products: str) -> tuple[tuple[int, int], ...]:
    """An entry of LIMITS."""
    steps: list[tuple[int, int]] = []
    for rows in ROWS:
        largest = 0
        for exponent in EXPONENTS:
            ratio = gain(dtype, products, rows, exponent)
            print(f"{dtype!s:<15} {products:<15} {rows:>5} rows, 2^{exponent}: {ratio:.2f}x", flush=True)
            if ratio < 1.0:
                break
            largest = 1 << exponent
        if largest > (steps[-1][1] if steps else 0):
            steps.append((rows if rows > ROWS[0] else 0, largest))
    return tuple(steps)


def rewritten(source: str, limits: Limits) -> str:
    """The source of ops/linear/_cpu.py with these LIMITS."""
    start, end = source.index("LIMITS: dict"), source.index("\n}\n") + 2
    lines = [source[start:].partition("\n")[0]]
    for (dtype, products, processor), steps in limits.items():
        spelled = ", ".join(f"({rows}, 1 << {largest.bit_length() - 1})" for rows, largest in steps)
        spelled += "," * (len(steps) == 1)
        lines.append(f'    ({dtype}, "{products}", "{processor}"): ({spelled}),')
    return source[:start] + "\n".join([*lines, "}"]) + source[end:]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser("python -m benchmarks.linear_limits", description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace this processor's entries in ops/linear/_cpu.py")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    processor = _cpu.processor(_cpu.cpu.load())
    found = {(dtype, name, processor): measured(dtype, name) for name, dtypes in PRODUCTS.items() for dtype in dtypes}
    print(*(f"{key}: {steps}" for key, steps in found.items()), sep="\n")
    if chosen.write:
        path = Path(str(_cpu.__file__))
        path.write_text(rewritten(path.read_text(), _cpu.LIMITS | found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
