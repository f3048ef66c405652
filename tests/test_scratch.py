"""Scratch memory of the CPU kernels: what was not written there neither reaches a result nor is computed with.

Unwritten scratch holds what earlier calls left. Arithmetic on it costs a hundred cycles per instruction on many
processors where it holds denormals, even if the results are dropped; the processor's flag for denormal operands shows
such arithmetic on every x86 processor. bfloat16 instructions (vdpbf16ps, AMX) take denormals as 0 and set no flag.
"""

import contextlib
import threading

import pytest
import torch

import transformer_kernels as tk
from tests.support import arguments
from tests.support.arguments import DTYPES, dtype_id
from tests.support.parity import run
from tests.support.random_calls import DRAWN, Draw
from transformer_kernels.backends import cpu

if cpu.unavailable(torch.device("cpu")) is not None:
    pytest.skip("the CPU kernels are not built", allow_module_level=True)

KERNELS = cpu.load()
ZEROS, DENORMALS, NANS = 0, 0x00010001, 0x7FFF7FFF  # of two elements of 16 bits, or one of float32
CALLS = 6
SHAPES = {  # B, H, Hk, Lq, Lk, D; threads
    "short": (2, 3, 3, 13, 13, 64, 1),
    "a last key and query alone": (1, 1, 1, 129, 129, 64, 1),
    "grouped": (1, 4, 2, 50, 77, 40, 2),
    "wide heads": (1, 1, 1, 65, 197, 144, 1),
    "chunks that queries share": (1, 1, 1, 140, 1030, 32, 1),
    "decode": (1, 4, 2, 1, 1025, 59, 1),
    "few queries": (1, 3, 1, 5, 1291, 64, 2),
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": 21},
    "adjusted": {"causal": True, "softcap": 4.0, "dropout_p": 0.2, "bias": True},
    "padded": {"padded": True},
}


def normal(*shape, dtype=torch.float32, seed=0):
    return arguments.normal(*shape, dtype=dtype, device=torch.device("cpu"), seed=seed)


@pytest.fixture(params=KERNELS.instruction_sets)
def instruction_set(request):
    used = KERNELS.instruction_set()
    KERNELS.use(request.param)
    yield request.param
    KERNELS.use(used)


@pytest.fixture
def set_threads():
    used = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(used)


def results(word, function, tensors, options, cotangents, seed):
    """The outputs and gradients as bits, computed in scratch full of `word`, and whether an operand was denormal."""
    KERNELS.fill_scratch(word)
    try:
        KERNELS.denormal_operand()
        found = run(function, tensors, {**options, "backend": "cpu"}, cotangents, seed=seed)
        denormal = KERNELS.denormal_operand()
    finally:
        KERNELS.fill_scratch(-1)
    tensors = [*found.outputs, *(x for x in found.gradients.values() if x is not None)]
    return [x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16) for x in tensors], denormal


def check(op, tensors, options, seed=0):
    """Whether the clean call has no denormal operands itself, so that the check of these was one."""
    function = getattr(tk, op)
    outputs = run(function, tensors, {**options, "backend": "cpu"}, seed=seed).outputs
    cotangents = [normal(*x.shape, dtype=x.dtype, seed=7).detach() for x in outputs]
    clean, denormal = results(ZEROS, function, tensors, options, cotangents, seed)
    for word in (DENORMALS, NANS):
        found, reads = results(word, function, tensors, options, cotangents, seed)
        assert all(map(torch.equal, found, clean)), f"{op} depends on unwritten scratch: {options}"
        assert reads <= denormal, f"{op} computes with unwritten scratch: {options}"
    return not denormal


@pytest.mark.parametrize("op", DRAWN)
def test_no_operation_reads_unwritten_scratch(op, instruction_set):
    checked = 0
    for number in range(CALLS):
        draw = Draw(f"scratch:{op}:{number}")
        tensors, options = DRAWN[op](draw)
        tensors = {name: x for name, x in tensors.items() if x is not None}
        with contextlib.suppress(tk.UnsupportedByBackend):
            checked += check(op, tensors, options, draw.seed)
    assert checked > 1, "too few calls without denormals of their own"


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_does_not_read_unwritten_scratch(shape, dtype, instruction_set, set_threads):
    B, H, Hk, Lq, Lk, D, threads = SHAPES[shape]
    set_threads(threads)
    for options in OPTIONS.values():
        heads = {"q": (H, Lq), "k": (Hk, Lk), "v": (Hk, Lk)}
        tensors = {name: normal(B, *size, D, dtype=dtype, seed=seed) for seed, (name, size) in enumerate(heads.items())}
        given = dict(options)
        if given.pop("padded", False):
            tensors["key_padding_mask"] = torch.arange(Lk).expand(B, Lk) % 5 != 1
        if given.pop("bias", False):
            tensors["attn_bias"] = normal(H, Lq, Lk, seed=3)
        inference = {name: x.detach() for name, x in tensors.items()}
        assert check("attention", tensors, given) + check("attention", inference, given) or dtype is torch.float16


def scratch_of(function):
    """The bytes of scratch that a new thread keeps after a call."""
    kept = []
    thread = threading.Thread(target=lambda: kept.append((function(), KERNELS.kept_scratch())[1]))
    thread.start()
    thread.join()
    return kept[0]


@pytest.mark.parametrize(("queries", "keys"), [(1, 20), (1, 2100), (3, 1030)])
def test_scratch_of_few_queries_does_not_grow_with_the_batch(queries, keys):
    def kept(batch):
        q, k = normal(batch, 8, queries, 16), normal(batch, 8, keys, 16)
        return scratch_of(lambda: tk.attention(q.detach(), k.detach(), k.detach(), backend="cpu"))

    assert 0 < kept(64) <= 2 * kept(8) < 1 << 20
