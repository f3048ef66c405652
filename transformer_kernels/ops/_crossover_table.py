"""The sizes of calls that PyTorch's operators compute in less time than the CPU kernels, by instruction set.

For each operation and element size in bytes (0: any), forward alone and with gradients: elements from which ours is
the faster one, or a pair (first, end): PyTorch's is the faster one from `first` on to below `end`.
Counted are the elements of the first tensor, of the result of an embedding, and the scores of attention;
with gradients `linear` has a rule of its own (`patching/_products.py`). "attention rerouted" is F's function inside
`accelerate`, where a call that is rerouted costs about 8 us more. "attention module" is a patched module, which runs
its original forward; with a mask its rows are counted. Rows of modules are measured by `python -m benchmarks.patched
--modules` in float32, in inference, those of "rms_norm module" by whole models; their training is this package's.
"multihead" modules are torch.nn.MultiheadAttention, with "weights" where it returns these: measured on a Zen 4 with
AVX-512 in both modes. Their entries in the other columns are copies and were not measured.

"avx2" and "avx512" were measured by `python -m benchmarks.crossovers --write` on an AMD EPYC with AVX-512, each in a
process that is restricted to it ("avx2" is also the table of plain kernels); "amx" on two Xeons with AMX, its linear
on an EPYC with AVX2. Most entries of "amx" are of the faster Xeon, 7.7 TFLOP/s in bfloat16 on two cores, and were
measured beside other work; those of "rms_norm module" and of softmax in 16 bits with gradients are of an idle Xeon 6.
"""

NEVER = 1 << 62
REROUTED, MODULE = " rerouted", " module"

Limit = int | tuple[int, int]

LEVELS = ("avx2", "avx512", "amx")

ROWS: dict[tuple[str, int], tuple[tuple[Limit, Limit], ...]] = {
    ("add_layer_norm", 4): ((1 << 23, 1 << 23), (1 << 14, 1 << 17), (1 << 18, 1 << 18)),
    ("add_rms_norm", 4): ((0, 0), (0, 0), (0, 0)),
    ("attention", 4): ((0, 1 << 11), (0, 1 << 11), (1 << 11, 1 << 15)),
    ("attention", 2): ((0, 0), (0, 0), (0, 0)),
    ("attention module", 0): ((1 << 17, 0), (1 << 17, 0), (1 << 17, 0)),
    ("attention rerouted", 4): ((1 << 14, 1 << 15), (1 << 12, 1 << 13), (1 << 15, 1 << 17)),
    ("attention rerouted", 2): ((1 << 11, 0), (1 << 11, 0), (1 << 16, 0)),
    ("cross_entropy", 4): ((1 << 15, 1 << 14), (1 << 14, 1 << 14), (1 << 15, 1 << 15)),
    ("cross_entropy", 2): ((1 << 15, 1 << 14), (1 << 15, 1 << 14), (1 << 15, 1 << 15)),
    ("cross_entropy rerouted", 4): ((1 << 17, 1 << 16), (1 << 16, 1 << 16), (1 << 16, 1 << 16)),
    ("cross_entropy rerouted", 2): ((1 << 16, 1 << 16), (1 << 16, 1 << 16), (1 << 17, 1 << 16)),
    ("embedding", 4): ((1 << 24, 1 << 19), (1 << 23, 1 << 18), (NEVER, 1 << 20)),
    ("embedding", 2): ((NEVER, 1 << 19), (1 << 24, 1 << 19), (NEVER, 1 << 20)),
    ("embedding rerouted", 4): ((1 << 24, 1 << 19), (1 << 23, 1 << 19), (NEVER, 1 << 20)),
    ("embedding rerouted", 2): ((NEVER, 1 << 19), (1 << 24, 1 << 19), (NEVER, 1 << 20)),
    ("gated mlp module", 0): ((1 << 15, 0), (1 << 15, 0), (1 << 15, 0)),
    ("gelu", 4): ((1 << 23, 1 << 23), (1 << 21, 0), ((0, 1 << 22), 0)),
    ("gelu", 2): ((1 << 24, 1 << 16), (1 << 24, 1 << 23), (NEVER, 1 << 23)),
    ("gelu module", 0): ((1 << 10, 0), (1 << 10, 0), (1 << 10, 0)),
    ("gelu rerouted", 4): ((1 << 23, 1 << 23), (1 << 21, 1 << 18), ((0, 1 << 22), 0)),
    ("gelu rerouted", 2): ((1 << 24, 1 << 18), (1 << 24, 1 << 23), (NEVER, 1 << 23)),
    ("gelu_tanh", 4): ((1 << 11, 1 << 12), (1 << 12, 1 << 13), (1 << 12, 1 << 13)),
    ("gelu_tanh", 2): ((1 << 11, 1 << 12), (1 << 12, 1 << 13), (1 << 12, 1 << 13)),
    ("gelu_tanh rerouted", 4): ((1 << 12, 1 << 13), (1 << 13, 1 << 14), (1 << 12, 1 << 13)),
    ("gelu_tanh rerouted", 2): ((1 << 12, 1 << 13), (1 << 13, 1 << 14), (1 << 12, 1 << 14)),
    ("layer_norm", 4): ((1 << 16, 1 << 23), (1 << 15, 1 << 23), (1 << 19, 1 << 22)),
    ("layer_norm", 2): ((1 << 18, 1 << 16), (1 << 16, 1 << 16), (1 << 17, 1 << 16)),
    ("layer_norm rerouted", 4): ((1 << 17, 1 << 23), (1 << 17, 1 << 18), (1 << 19, 1 << 22)),
    ("layer_norm rerouted", 2): ((1 << 19, 1 << 17), (1 << 17, 1 << 16), (1 << 17, 1 << 17)),
    ("linear", 4): ((NEVER, 0), (NEVER, 0), (NEVER, 0)),
    ("masked attention module", 0): ((1 << 7, 0), (1 << 7, 0), (1 << 7, 0)),
    ("masked multihead module", 0): ((1 << 7, 1 << 7), (1 << 7, 1 << 7), (1 << 7, 1 << 7)),
    ("multihead module", 0): ((1 << 17, 1 << 13), (1 << 17, 1 << 13), (1 << 17, 1 << 13)),
    ("multihead weights module", 0): ((1 << 19, 1 << 17), (1 << 19, 1 << 17), (1 << 19, 1 << 17)),
    ("packed mlp module", 0): ((1 << 17, 0), (1 << 17, 0), (1 << 17, 0)),
    ("residual norm module", 0): ((1 << 23, 0), (1 << 14, 0), (1 << 18, 0)),
    ("rms_norm", 4): ((0, 0), (0, 0), (0, 0)),
    ("rms_norm", 2): ((0, 0), (0, 0), (0, 0)),
    ("rms_norm module", 0): ((0, 0), (0, 0), (0, 0)),
    ("rms_norm rerouted", 4): ((1 << 15, 0), (0, 0), (1 << 14, 0)),
    ("rms_norm rerouted", 2): ((0, 0), (0, 0), (0, 0)),
    ("softmax", 4): ((1 << 15, 1 << 18), (1 << 14, 1 << 16), (1 << 14, 1 << 19)),
    ("softmax", 2): ((1 << 16, 1 << 24), (1 << 14, 1 << 17), (1 << 15, 1 << 18)),
    ("softmax rerouted", 4): ((1 << 16, 1 << 18), (1 << 15, 1 << 17), (1 << 15, 1 << 19)),
    ("softmax rerouted", 2): ((1 << 16, 1 << 24), (1 << 15, 1 << 17), (1 << 15, 1 << 19)),
}
"""One column for each of LEVELS."""

TABLE = {level: {entry: limits[i] for entry, limits in ROWS.items()} for i, level in enumerate(LEVELS)}
