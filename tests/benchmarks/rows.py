"""Rows as a run would have written them, with times from a formula."""

STAMP = {
    "device": "NVIDIA Test",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "driver": "580.0",
    "commit": "0123456789ab",
    "date": "2026-01-02T03:04:05+00:00",
}


def operation_row(seconds, *, candidate="ours triton", **changes):
    """A timed row of attention; keyword arguments replace its columns."""
    row = {
        "kind": "operation",
        "op": "attention",
        "case": "causal D64",
        "direction": "both",
        "candidate": candidate,
        "dtype": "bfloat16",
        "shape": {"B": 2, "H": 4, "Hk": 4, "Lq": 512, "L": 512, "D": 64},
        "axis": "L",
        "status": "ok",
        "seconds": seconds,
        "low": 0.99 * seconds,
        "high": 1.01 * seconds,
        "spread": 0.02,
        "samples": 20,
        "method": "graph",
        "bytes": 10**6,
        "flops": 1e9,
        "gbps": 1e6 / seconds / 1e9,
        "tflops": 1e9 / seconds / 1e12,
        "bound": "compute",
        "fraction": 0.5,
        "peak_memory": 2**20,
        **STAMP,
    }
    return row | changes


def sweep(candidate, time_power, memory_power):
    """Attention over five lengths whose time and memory per sequence follow the given powers of the length."""
    rows = []
    for length in (256, 512, 1024, 2048, 4096):
        batch = 4096 // length
        shape = {"B": batch, "H": 4, "Hk": 4, "Lq": length, "L": length, "D": 64}
        memory = int(batch * 100 * length**memory_power)
        rows.append(
            operation_row(batch * 1e-9 * length**time_power, candidate=candidate, shape=shape, peak_memory=memory)
        )
    return rows


def whole_record():
    """Something of each kind, for pictures and reports."""
    rows = sweep("ours triton", 2.0, 1.0) + sweep("eager", 2.0, 2.0)
    for op, axis in (("softmax", "N"), ("layer_norm", "N"), ("linear_cross_entropy", "V")):
        for width in (256, 1024, 4096):
            for candidate, seconds in (("ours triton", 1e-5), ("eager", 2e-5)):
                rows.append(
                    operation_row(
                        seconds,
                        candidate=candidate,
                        op=op,
                        case="rows",
                        direction="forward",
                        shape={"M": 64, axis: width},
                        axis=axis,
                        bound="memory",
                    )
                )
    for rung, seconds in (("SDPA + fused AdamW", 4e-3), ("SDPA + compile", 2e-3), ("ours triton + one graph", 5e-4)):
        changes = {"kind": "step", "op": "char_gpt", "case": "training step", "direction": "step"}
        rows.append(
            operation_row(
                seconds,
                candidate=f"{rung}, bf16",
                shape={"B": 64, "L": 64},
                tokens_per_second=4096 / seconds,
                **changes,
            )
        )
    rows.append(operation_row(5e-6, kind="call", op="gelu", case="host", direction="raw", shape={"M": 4, "N": 32}))
    limits = {"kind": "limit", "op": "device", "case": "limits", "direction": "-", "candidate": "measured"}
    rows.append(
        {**limits, "dtype": "-", "shape": {}, "status": "ok", "memory": 4e12, "compute": {"bfloat16": 7e14}, **STAMP}
    )
    rows.append(operation_row(1.0, candidate="quack") | {"status": "skipped", "reason": "quack is not installed"})
    return rows
