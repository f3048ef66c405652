"""Sizes from which a CPU kernel is no slower than PyTorch's operator, by instruction set.

For each operation and element size in bytes: elements from which ours is the faster one, (forward alone, with
gradients). Counted are the elements of the first tensor, of the result of an embedding, and the scores of attention;
with gradients `linear` has a rule of its own (`patching/_products.py`).

"avx512" was measured by `python -m benchmarks.crossovers --write` on an AMD EPYC with AVX-512; "amx" on a Xeon with
AMX, its add_layer_norm, add_rms_norm and linear on an EPYC with AVX2. "avx2", which is also the table of plain kernels,
is not measured by itself: it has the values of "amx".
"""

NEVER = 1 << 62

TABLE: dict[str, dict[tuple[str, int], tuple[int, int]]] = {
    "avx2": {
        ("add_layer_norm", 4): (1 << 18, 0),
        ("add_rms_norm", 4): (1 << 14, 0),
        ("attention", 4): (1 << 16, 1 << 17),
        ("attention", 2): (1 << 16, 1 << 10),
        ("cross_entropy", 4): (1 << 17, 1 << 16),
        ("cross_entropy", 2): (1 << 17, 1 << 16),
        ("embedding", 4): (NEVER, NEVER),
        ("embedding", 2): (NEVER, NEVER),
        ("gelu", 4): (NEVER, NEVER),
        ("gelu", 2): (NEVER, NEVER),
        ("gelu_tanh", 4): (1 << 15, 1 << 15),
        ("gelu_tanh", 2): (1 << 15, 1 << 15),
        ("layer_norm", 4): (1 << 19, 1 << 19),
        ("layer_norm", 2): (1 << 19, 1 << 18),
        ("linear", 4): (NEVER, 0),
        ("rms_norm", 4): (1 << 15, 1 << 15),
        ("rms_norm", 2): (1 << 15, 1 << 14),
        ("softmax", 4): (1 << 16, 1 << 19),
        ("softmax", 2): (1 << 18, NEVER),
    },
    "avx512": {
        ("add_layer_norm", 4): (1 << 16, NEVER),
        ("add_rms_norm", 4): (0, 0),
        ("attention", 4): (1 << 11, 1 << 12),
        ("attention", 2): (0, 0),
        ("cross_entropy", 4): (1 << 16, 1 << 16),
        ("cross_entropy", 2): (1 << 16, 1 << 16),
        ("embedding", 4): (NEVER, NEVER),
        ("embedding", 2): (NEVER, 1 << 19),
        ("gelu", 4): (NEVER, 0),
        ("gelu", 2): (NEVER, NEVER),
        ("gelu_tanh", 4): (1 << 12, 1 << 14),
        ("gelu_tanh", 2): (1 << 12, 1 << 14),
        ("layer_norm", 4): (1 << 16, 1 << 23),
        ("layer_norm", 2): (1 << 16, 1 << 16),
        ("linear", 4): (NEVER, 0),
        ("rms_norm", 4): (0, 0),
        ("rms_norm", 2): (0, 0),
        ("softmax", 4): (1 << 14, 1 << 17),
        ("softmax", 2): (1 << 14, 1 << 18),
    },
    "amx": {
        ("add_layer_norm", 4): (1 << 18, 0),
        ("add_rms_norm", 4): (1 << 14, 0),
        ("attention", 4): (1 << 16, 1 << 17),
        ("attention", 2): (1 << 16, 1 << 10),
        ("cross_entropy", 4): (1 << 17, 1 << 16),
        ("cross_entropy", 2): (1 << 17, 1 << 16),
        ("embedding", 4): (NEVER, NEVER),
        ("embedding", 2): (NEVER, NEVER),
        ("gelu", 4): (NEVER, NEVER),
        ("gelu", 2): (NEVER, NEVER),
        ("gelu_tanh", 4): (1 << 15, 1 << 15),
        ("gelu_tanh", 2): (1 << 15, 1 << 15),
        ("layer_norm", 4): (1 << 19, 1 << 19),
        ("layer_norm", 2): (1 << 19, 1 << 18),
        ("linear", 4): (NEVER, 0),
        ("rms_norm", 4): (1 << 15, 1 << 15),
        ("rms_norm", 2): (1 << 15, 1 << 14),
        ("softmax", 4): (1 << 16, 1 << 19),
        ("softmax", 2): (1 << 18, NEVER),
    },
}
