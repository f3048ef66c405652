"""The workloads: for each operation its inputs, minimum bytes and FLOPs.

Bytes: each input is read once, each output written once, no intermediates. FLOPs: a matrix product of (m, k) and (k, n)
is 2 m k n; every elementwise operation, exp and erf included, is one. Shapes: B H L D for attention (Lq queries, Hk key
heads), rows M and columns N for the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

DIRECTIONS = ("forward", "backward", "both")

BACKWARD_PRODUCTS = 2.5
"""Attention's backward pass has five matrix products, its forward pass two."""


@dataclass(frozen=True)
class RowOperation:
    """An operation on M rows of N columns: its arguments, minimum bytes and FLOPs.

    Args:
        matrices, vectors: names of the arguments of shape (M, N) and (N,).
        forward, backward: number of matrices, vectors, and float32 or int32 numbers per row that each pass moves.
        flops: per element, (forward, backward).
    """

    matrices: tuple[str, ...]
    vectors: tuple[str, ...]
    forward: tuple[int, int, int]
    backward: tuple[int, int, int]
    flops: tuple[int, int]


X, NORM = ("x",), ("weight", "bias")
ROWS = {
    # x -> y | y, dy -> dx; scale, - max, exp, sum, / sum | dy * y, sum, -, * y
    "softmax": RowOperation(X, (), (2, 0, 0), (3, 0, 0), (5, 4)),
    # sum, centre, square, sum, * rstd, * weight, + bias | xhat 2, dx 8, dweight 2, dbias 1
    "layer_norm": RowOperation(X, NORM, (2, 2, 2), (3, 3, 2), (7, 13)),
    # x, residual -> y, sum | dy, dsum, sum -> dx, which is also the gradient of the residual; one addition each way
    "add_layer_norm": RowOperation((*X, "residual"), NORM, (4, 2, 2), (4, 3, 2), (8, 14)),
    # square, sum, * rstd, * weight | xhat 1, dx 5, dweight 2
    "rms_norm": RowOperation(X, ("weight",), (2, 1, 1), (3, 2, 1), (4, 8)),
    "add_rms_norm": RowOperation((*X, "residual"), ("weight",), (4, 1, 1), (4, 2, 1), (5, 9)),
    # / sqrt(2), erf, + 1, * x, / 2 | Phi 4, density 4 (square, scale, exp, scale), * x, +, * dy
    "gelu": RowOperation(X, (), (2, 0, 0), (3, 0, 0), (5, 11)),
    "bias_gelu": RowOperation(X, ("bias",), (2, 1, 0), (3, 2, 0), (6, 13)),  # + bias | + bias, sum for dbias
    # + bias, max | y, dy -> dx, dbias: select, sum for dbias
    "bias_relu": RowOperation(X, ("bias",), (2, 1, 0), (3, 1, 0), (2, 2)),
    # exp, + 1, /, * gate, * up | sigmoid 3, its slope 4, * up, two products with dy
    "swiglu": RowOperation(("gate", "up"), (), (3, 0, 0), (5, 0, 0), (5, 10)),
    "geglu": RowOperation(("gate", "up"), (), (3, 0, 0), (5, 0, 0), (6, 13)),  # as gelu, * up | * up, gelu, * dy
    # max, - max, exp, sum | - max, exp, / sum, - target, * dloss; int64 targets, maximum and sum
    "cross_entropy": RowOperation(("logits",), (), (1, 0, 4), (2, 0, 4), (4, 5)),
    # + position, LayerNorm 7 | + position, LayerNorm 13, sums for dweight and dpositions; bytes below
    "embedding": RowOperation((), (), (0, 0, 0), (0, 0, 0), (8, 16)),
}
ROW_OPERATIONS = tuple(ROWS)
OPERATIONS = ("attention", *ROW_OPERATIONS, "linear_cross_entropy")
APPROXIMATE = ("gelu", "bias_gelu", "geglu")

VOCABULARY = 50_257
SEQUENCE = 1024
MAX_EMBEDDING_WIDTH = 8192
"""Tokens form sequences of at most this length, the maximum width of all models."""


@dataclass(frozen=True)
class Workload:
    """A timed task, independent of the candidate.

    Args:
        op: the operation.
        case: the sweep that it belongs to, such as "causal D64".
        direction: "forward", "backward", or "both" (forward, then backward).
        dtype: of the inputs.
        shape: sizes by name. axis: the name of the size that the sweep varies.
        options: keyword arguments of the operation; dropout is left out when a result is checked.
        bytes, flops: the minimum that any implementation moves and computes.
        key_lengths: for padded attention, the number of real tokens in each sequence.
    """

    op: str
    case: str
    direction: str
    dtype: torch.dtype
    shape: dict[str, int]
    axis: str
    options: dict[str, Any]
    bytes: int
    flops: float
    key_lengths: tuple[int, ...] = field(default=())

    def without_dropout(self) -> Workload:
        """The same workload with a deterministic result."""
        kept = {name: value for name, value in self.options.items() if name != "dropout_p"}
        return self if kept == self.options else replace(self, options=kept)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"{self.op} {self.case} {self.direction} {self.dtype_name} {sizes}"

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        """Standard normal tensors under the operation's argument names."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(self.dtype)

        size = self.shape
        if self.op == "attention":
            # Views of (B, L, H, D) tensors, as returned by a model's projections.
            queries = normal(size["B"], size["Lq"], size["H"], size["D"])
            keys, values = (normal(size["B"], size["L"], size["Hk"], size["D"]) for _ in range(2))
            tensors = {"q": queries.transpose(1, 2), "k": keys.transpose(1, 2), "v": values.transpose(1, 2)}
            if self.key_lengths:
                lengths = torch.tensor(self.key_lengths, device=device)
                tensors["key_padding_mask"] = torch.arange(size["L"], device=device) < lengths[:, None]
            return tensors
        if self.op == "linear_cross_entropy":
            return {
                "x": normal(size["M"], size["E"]),
                "weight": normal(size["V"], size["E"]) * size["E"] ** -0.5,
                "targets": torch.randint(0, size["V"], (size["M"],), generator=generator, device=device),
            }
        rows, columns = size["M"], size["N"]
        if self.op == "embedding":
            vocabulary, length = embedding_sizes(rows)
            shape = (rows // length, length)
            tensors = {"tokens": torch.randint(vocabulary, shape, generator=generator, device=device)}
            tensors |= {"weight": normal(vocabulary, columns), "positions": normal(length, columns)}
            return tensors | {"norm_weight": normal(columns), "norm_bias": normal(columns)}
        described = ROWS[self.op]
        tensors = {name: normal(rows, columns) for name in described.matrices}
        tensors |= {name: normal(columns) for name in described.vectors}
        if self.op == "cross_entropy":
            tensors["targets"] = torch.randint(0, columns, (rows,), generator=generator, device=device)
        return tensors


def attention(
    dtype: torch.dtype,
    direction: str,
    *,
    B: int,
    H: int,
    L: int,
    D: int,
    Hk: int | None = None,
    Lq: int | None = None,
    causal: bool = False,
    padded: bool = False,
    window: int | None = None,
    dropout_p: float = 0.0,
    case: str = "",
) -> Workload:
    """Attention of Lq queries (L by default) over L keys; a padded batch has a quarter of padding on average."""
    Hk, Lq = Hk or H, Lq or L
    lengths = tuple(max(1, L - (L * b // max(2 * (B - 1), 1))) for b in range(B)) if padded else ()
    pairs = Lq * (sum(lengths) if padded else B * L) * H
    if causal and Lq > 1:
        pairs //= 2
    named = f"{'causal' if causal else 'padded' if padded else 'full'} D{D}"
    options: dict[str, Any] = {"causal": causal}
    if window is not None:
        pairs, named, options = B * H * seen_in_window(L, window), f"window {window} D{D}", {"window": window}
    if dropout_p:
        named, options = f"{named} dropout", options | {"dropout_p": dropout_p}
    products = {"forward": 1.0, "backward": BACKWARD_PRODUCTS, "both": 1.0 + BACKWARD_PRODUCTS}
    return Workload(
        op="attention",
        case=case or named,
        direction=direction,
        dtype=dtype,
        shape={"B": B, "H": H, "Hk": Hk, "Lq": Lq, "L": L, "D": D},
        axis="L",
        options=options,
        bytes=attention_bytes(dtype.itemsize, direction, B, H, Hk, Lq, L, D) + (B * L if padded else 0),
        flops=4.0 * pairs * D * products[direction],
        key_lengths=lengths,
    )


def seen_in_window(L: int, window: int) -> int:
    """Number of (query, key) pairs with L queries and keys less than `window` away on either side."""
    return sum(min(i + window, L) - max(i - window + 1, 0) for i in range(L))


def attention_bytes(itemsize: int, direction: str, B: int, H: int, Hk: int, Lq: int, L: int, D: int) -> int:
    """q, k, v in, out and the float32 log-sum-exp out; backward also dout in, dq, dk, dv out."""
    queries, keys, lse = B * H * Lq * D * itemsize, B * Hk * L * D * itemsize, B * H * Lq * 4
    forward = 2 * queries + 2 * keys + lse
    backward = 4 * queries + 4 * keys + lse
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def rows(op: str, dtype: torch.dtype, direction: str, *, M: int, N: int, approximate: str = "none") -> Workload:
    """An operation on M rows of N columns."""
    if op == "embedding":
        M -= M % embedding_sizes(M)[1]  # whole sequences
    forward, backward = ROWS[op].flops
    options = {"approximate": approximate} if op in APPROXIMATE else {}
    return Workload(
        op=op,
        case=approximate if op in APPROXIMATE else "rows",
        direction=direction,
        dtype=dtype,
        shape={"M": M, "N": N},
        axis="N",
        options=options,
        bytes=row_bytes(op, dtype.itemsize, direction, M, N),
        flops=float(M * N * {"forward": forward, "backward": backward, "both": forward + backward}[direction]),
    )


def embedding_sizes(M: int) -> tuple[int, int]:
    """Vocabulary rows and sequence length for M tokens; the table is no larger than the output."""
    return min(VOCABULARY, M), min(SEQUENCE, M)


def embedding_bytes(itemsize: int, M: int, N: int) -> tuple[int, int]:
    """Bytes forward and backward: the distinct vocabulary rows of M random tokens, each once; ids are int64."""
    vocabulary, length = embedding_sizes(M)
    named = round(vocabulary * (1.0 - (1.0 - 1.0 / vocabulary) ** M))
    row, statistics = N * itemsize, 2 * M * 4
    gathered = 8 * M + (named + length) * row  # tokens, weight, positions
    forward = gathered + (M + 2) * row + statistics  # norm_weight, norm_bias -> y
    # dy, norm_weight -> dweight, dpositions, dnorm_weight, dnorm_bias
    backward = gathered + statistics + (M + 1 + vocabulary + length + 2) * row
    return forward, backward


def row_bytes(op: str, itemsize: int, direction: str, M: int, N: int) -> int:
    """Bytes of a row operation; statistics are float32, parameters have the dtype of x."""
    if op == "embedding":
        forward, backward = embedding_bytes(itemsize, M, N)
    else:
        sizes = M * N * itemsize, N * itemsize, 4 * M
        forward, backward = (
            sum(count * size for count, size in zip(counts, sizes, strict=True))
            for counts in (ROWS[op].forward, ROWS[op].backward)
        )
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def output_layer(dtype: torch.dtype, direction: str, *, M: int, E: int, V: int) -> Workload:
    """An output layer of V classes and its loss over M rows: forward only, or with all gradients.

    The logits count neither as read nor as written, because they need not be materialised.
    """
    inputs, targets = (M * E + V * E) * dtype.itemsize, 8 * M
    forward, backward = ROWS["cross_entropy"].flops
    flops = {"forward": 2 * E + forward, "both": 6 * E + forward + backward}[direction]
    return Workload(
        op="linear_cross_entropy",
        case="output layer",
        direction=direction,
        dtype=dtype,
        shape={"M": M, "E": E, "V": V},
        axis="V",
        options={},
        bytes=inputs * (1 if direction == "forward" else 2) + targets,
        flops=float(M * V * flops),
    )


@dataclass(frozen=True)
class Sizes:
    """The sizes of a device's sweeps."""

    tokens: int
    heads: dict[int, int]  # by head dimension
    lengths: tuple[int, ...]
    elements: int
    widths: tuple[int, ...]
    decode: tuple[int, int]  # batch, longest cache
    dtypes: tuple[torch.dtype, ...]


GPU = Sizes(
    tokens=16384,
    heads={64: 32, 128: 16},
    lengths=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    elements=2**26,
    widths=(128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    decode=(16, 65536),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
)
CPU = Sizes(
    tokens=2048,
    heads={32: 8, 64: 4, 128: 2},
    lengths=(64, 128, 256, 512, 1024, 2048, 4096),
    elements=2**22,
    widths=(128, 768, 4096, 65536),
    decode=(4, 8192),
    dtypes=(torch.float32,),
)
QUICK = Sizes(
    tokens=256,
    heads={64: 2, 128: 1},
    lengths=(64, 128, 256),
    elements=2**14,
    widths=(128, 1024),
    decode=(2, 256),
    dtypes=(torch.float32,),
)


def attention_sweep(
    sizes: Sizes, dtype: torch.dtype, D: int, direction: str, kind: str, **options: Any
) -> Iterator[Workload]:
    """A fixed number of tokens in sequences of increasing length; `kind` is full, causal or padded."""
    for length in sizes.lengths:
        yield attention(
            dtype,
            direction,
            B=max(1, sizes.tokens // length),
            H=sizes.heads[D],
            L=length,
            D=D,
            causal=kind == "causal",
            padded=kind == "padded",
            **options,
        )


def decode_sweep(sizes: Sizes, dtype: torch.dtype) -> Iterator[Workload]:
    """One new token per sequence over a cache of increasing length, four query heads per key head."""
    batch, longest = sizes.decode
    heads = sizes.heads[128]
    for length in (longest // 64, longest // 16, longest // 4, longest):
        yield attention(
            dtype, "forward", B=batch, H=heads, Hk=max(1, heads // 4), Lq=1, L=length, D=128, case="decode D128"
        )


def row_sweep(
    sizes: Sizes, op: str, dtype: torch.dtype, direction: str, approximate: str = "none"
) -> Iterator[Workload]:
    """A fixed number of elements in rows of increasing width."""
    for width in sizes.widths:
        if op == "embedding" and width > MAX_EMBEDDING_WIDTH:
            continue
        yield rows(op, dtype, direction, M=max(1, sizes.elements // width), N=width, approximate=approximate)


def output_layer_sweep(sizes: Sizes, dtype: torch.dtype, direction: str) -> Iterator[Workload]:
    """Increasing vocabularies, including GPT-2's odd size; the width is the head dimension times the heads."""
    rows, width = sizes.tokens // 4, 64 * sizes.heads[64] // 2
    for classes in (1024, 8192, 50257):
        if rows * classes <= 4 * sizes.elements:
            yield output_layer(dtype, direction, M=rows, E=width, V=classes)
