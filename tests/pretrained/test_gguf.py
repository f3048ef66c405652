"""GGUF files of a Llama: transformers' results, what is refused by name, and damaged or hostile files."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

import transformer_kernels as tk
from tests.support.gguf_files import llama_metadata, llama_tensors, random_llama, string, write_gguf
from transformer_kernels import cli

gguf = pytest.importorskip("gguf", reason="gguf is not installed (extra `test`)")
from transformer_kernels.pretrained.gguf import Reader  # noqa: E402


def llama(path, tensors=None, metadata=None, **optional):
    return write_gguf(path, llama_metadata(**optional) | (metadata or {}), tensors or random_llama())


def half(*numbers):
    return np.array(numbers, np.float16).tobytes()


NIBBLES = bytes((low | high << 4) for low, high in zip(range(16), reversed(range(16)), strict=True))
LEVELS = np.array([*range(16), *reversed(range(16))], np.float32)
STORED = {
    "F32": (0, np.arange(32, dtype=np.float32).tobytes(), np.arange(32.0)),
    "F16": (1, np.arange(32, dtype=np.float16).tobytes(), np.arange(32.0)),
    "Q4_0": (2, half(0.5) + NIBBLES, (LEVELS - 8) * 0.5),
    "Q4_1": (3, half(0.5, -1.0) + NIBBLES, LEVELS * 0.5 - 1.0),
    "Q8_0": (8, half(0.25) + np.arange(-16, 16, dtype=np.int8).tobytes(), np.arange(-16, 16) * 0.25),
}


@pytest.mark.parametrize("form", STORED)
def test_stored_forms(form, tmp_path):
    number, content, expected = STORED[form]
    for extra in range(0, 32, 5):  # the header ends at different offsets from a multiple of 32
        metadata = {"general.architecture": "llama" + "a" * extra}
        file = Reader(write_gguf(tmp_path / "a.gguf", metadata, {"x": ((2, 32), number, content * 2)}))
        assert file.metadata == metadata
        read = file.stored()["x"].read()
        assert torch.equal(read, torch.tensor(np.tile(expected, (2, 1)), dtype=torch.float32))


@torch.no_grad()
def test_a_llama_in_a_gguf_file(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test`)")
    tokens = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
    cases = [(1e4, False, {}), (5e5, False, {"rope.freq_base": 5e5}), (1e4, True, {"rope.dimension_count": 8})]
    for base, tied, optional in cases:
        torch.manual_seed(0)
        rope = {"rope_type": "default", "rope_theta": base}
        config = transformers.LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=tied)
        theirs = transformers.LlamaForCausalLM(config).eval()
        state = theirs.state_dict()
        if tied:
            del state["lm_head.weight"]
        ours = tk.load_pretrained(llama(tmp_path / "a.gguf", llama_tensors(state), **optional))
        assert ours.config.tied == tied
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


HARMLESS = {
    "llama.attention.causal": True,
    "llama.attention.key_length": 8,
    "llama.attention.value_length": 8,
    "llama.expert_count": 0,
    "llama.rope.scaling.type": "none",
    "llama.vocab_size": 97,
    "general.name": "A Llama",
    "general.quantization_version": 2,
    "quantize.imatrix.file": "a.dat",
    "tokenizer.ggml.pre": "of no concern to a model that reads tokens",
}
CHANGES = {
    "llama.attention.causal": False,
    "llama.attention.clamp_kqv": 8.0,
    "llama.attention.key_length": 16,
    "llama.attention.max_alibi_bias": 8.0,
    "llama.attention.scale": 0.5,
    "llama.attention.sliding_window": 16,
    "llama.attn_logit_softcapping": 50.0,
    "llama.embedding_scale": 12.0,
    "llama.expert_count": 2,
    "llama.expert_used_count": 1,
    "llama.final_logit_softcapping": 30.0,
    "llama.logit_scale": 0.0625,
    "llama.residual_scale": 0.22,
    "llama.rope.dimension_count": 4,
    "llama.rope.scale_linear": 4.0,
    "llama.rope.scaling.attn_factor": 1.0,
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 32,
    "llama.rope.scaling.type": "linear",
    "llama.rope.scaling.yarn_log_multiplier": 0.1,
    "llama.use_parallel_residual": True,
    "llama.vocab_size": 98,
    "llama.an_option_of_next_year": 1,
}
FOREIGN = {"split.count": 2, "adapter.type": "lora", "general.type": "adapter", "qwen2.block_count": 2}


def test_keys_that_do_not_change_the_computation(tmp_path):
    plain = tk.load_pretrained(llama(tmp_path / "a.gguf"))
    other = tk.load_pretrained(llama(tmp_path / "b.gguf", metadata=HARMLESS))
    assert other.config == plain.config


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_may_change_the_computation_is_refused_by_name(key, tmp_path):
    llama(tmp_path / "a.gguf", metadata={key: CHANGES[key]})
    with pytest.raises(ValueError, match=rf"a\.gguf: {key} = .* may change the computation"):
        tk.load_pretrained(tmp_path / "a.gguf")


@pytest.mark.parametrize("key", FOREIGN)
def test_keys_of_something_else_are_refused_by_name(key, tmp_path):
    llama(tmp_path / "a.gguf", metadata={key: FOREIGN[key]})
    with pytest.raises(ValueError, match=rf"a\.gguf: {key} = .* is not supported"):
        tk.load_pretrained(tmp_path / "a.gguf")


FIELDS = {
    "block_count": (0, 1.5, "two", True, [1, 2], 2**31),
    "attention.head_count": (0, 5, [4, 4]),
    "attention.head_count_kv": (0, 3, [2, 2]),
    "attention.layer_norm_rms_epsilon": (0.0, float("nan"), float("inf"), 1, "small"),
    "rope.freq_base": (0.0, float("nan"), float("-inf")),
    "feed_forward_length": (2**31 - 1,),
    "context_length": (0, "long"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in FIELDS for value in FIELDS[name]])
def test_sizes_that_no_model_has(name, value, tmp_path):
    llama(tmp_path / "a.gguf", **{name: value})
    with pytest.raises(ValueError, match=r"a\.gguf: "):
        tk.load_pretrained(tmp_path / "a.gguf")


def test_tensors_of_experts_and_other_names_are_unknown(tmp_path):
    tensors = random_llama()
    tensors["blk.0.ffn_gate.0.weight"] = tensors["blk.0.ffn_gate.1.weight"] = tensors.pop("blk.0.ffn_gate.weight")
    tensors["rope_freqs.weight"] = ((4,), 0, np.ones(4, np.float32).tobytes())
    tensors["blk.1.attn_q.bias"] = ((32,), 0, np.ones(32, np.float32).tobytes())
    llama(tmp_path / "a.gguf", tensors)
    with pytest.raises(ValueError, match=r"a\.gguf: the weights") as caught:
        tk.load_pretrained(tmp_path / "a.gguf")
    for name in ("blk.0.ffn_gate.0.weight", "blk.0.ffn_gate.1.weight", "blk.1.attn_q.bias", "rope_freqs.weight"):
        assert f"{name} is unknown" in str(caught.value)
    assert "model.layers.0.mlp.gate_proj.weight is missing" in str(caught.value)


def array(kind, count, content=b""):
    return struct.pack("<IIQ", 9, kind, count) + content


SHARED = {"token_embd.weight": ((97, 32), 0, bytes(97 * 32 * 4)), "output.weight": ((97, 32), 0, b"", 0)}
ONE = bytes(4)
HOSTILE = {
    "no GGUF at all": (lambda p: p.write_bytes(b"not a model at all, but long enough to be one"), "magic invalid"),
    "empty": (lambda p: p.write_bytes(b""), "empty"),
    "version 1": (lambda p: p.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0)), "version 1"),
    "big-endian": (lambda p: p.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0)), "big-endian"),
    "2^60 keys": (lambda p: p.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60)), "metadata keys; at most"),
    "2^60 tensors": (lambda p: p.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0)), "tensors; at most"),
    "a long key": (lambda p: p.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62)), "truncated"),
    "2^60 numbers": (lambda p: write_gguf(p, {"a": array(0, 2**60)}, {}), "truncated"),
    "2^60 texts": (lambda p: write_gguf(p, {"a": array(8, 2**60)}, {}), "strings in arrays; at most"),
    "2^19 texts": (lambda p: write_gguf(p, {"a": array(8, 2**19)}, {}), "truncated"),
    "arrays of arrays": (lambda p: write_gguf(p, {"a": array(9, 1, array(9, 1))}, {}), "array of arrays"),
    "a type of the future": (lambda p: write_gguf(p, {"a": struct.pack("<I", 77)}, {}), "77"),
    "no UTF-8": (lambda p: write_gguf(p, {"a": struct.pack("<I", 8) + string(b"\xff\xfe")}, {}), "utf-8"),
    "alignment 0": (lambda p: write_gguf(p, {"general.alignment": 0}, {}), "alignment"),
    "alignment of text": (lambda p: write_gguf(p, {"general.alignment": "32"}, {}), "alignment"),
    "shape ()": (lambda p: write_gguf(p, {}, {"x": ((), 0, ONE)}), r"x has shape \(\)"),
    "shape (0,)": (lambda p: write_gguf(p, {}, {"x": ((0,), 0, ONE)}), r"x has shape \(0,\)"),
    "five axes": (lambda p: write_gguf(p, {}, {"x": ((1,) * 5, 0, ONE)}), "x has shape"),
    "2^64 weights": (lambda p: write_gguf(p, {}, {"x": ((2**32, 2**32), 0, ONE)}), "truncated within x"),
    "behind the end": (lambda p: write_gguf(p, {}, {"x": ((1,), 0, ONE, 2**63)}), "truncated within x"),
    "wrapped around": (lambda p: write_gguf(p, {}, {"x": ((1,), 0, ONE, 2**64 - 32)}), "truncated within x"),
    "format 99": (lambda p: write_gguf(p, {}, {"x": ((32,), 99, ONE)}), "99"),
    "half a block": (lambda p: write_gguf(p, {}, {"x": ((16,), 2, bytes(64))}), "x has rows of 16 weights"),
    "shared bytes": (lambda p: write_gguf(p, {}, SHARED), "output.weight and token_embd.weight share bytes|share"),
    "a name twice": (
        lambda p: p.write_bytes(
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (string("a") + struct.pack("<I?", 7, True)) * 2
        ),
        "Duplicate a",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(case, tmp_path):
    write, message = HOSTILE[case]
    write(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=rf"(?i)a\.gguf: .*{message}"):
        tk.load_pretrained(tmp_path / "a.gguf")


def test_files_cut_anywhere(tmp_path, capsys):
    whole = llama(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "b.gguf"
    for size in [*range(0, 400, 7), *range(400, len(whole), 4001), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"b\.gguf: "):
            tk.load_pretrained(path)
    assert cli.main(["generate", "--model", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("transformer-kernels: error: ") and error.count("\n") == 1


def test_changed_bytes_of_a_header(tmp_path):
    """A changed byte gives a model or a ValueError that names the file."""
    whole = bytearray(llama(tmp_path / "a.gguf").read_bytes())
    random = np.random.default_rng(0)
    path = tmp_path / "b.gguf"
    for _ in range(150):
        changed = whole.copy()
        for at in random.integers(0, 2600, random.integers(1, 4)):
            changed[at] = random.integers(256)
        path.write_bytes(changed)
        try:
            tk.load_pretrained(path)
        except ValueError as error:
            assert str(path) in str(error)


def test_not_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=r"a\.gguf: must be a regular file"):
        tk.load_pretrained(tmp_path / "a.gguf")


def test_weights_that_are_not_finite(tmp_path):
    tensors = random_llama()
    shape, form, _ = tensors["output_norm.weight"]
    tensors["output_norm.weight"] = (shape, form, np.full(32, np.nan, np.float32).tobytes())
    llama(tmp_path / "a.gguf", tensors)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has values that are not finite"):
        tk.load_pretrained(tmp_path / "a.gguf")


BOUNDED = """
import resource, sys
import transformer_kernels as tk
import transformer_kernels.pretrained.gguf, transformer_kernels.pretrained.language_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    tk.load_pretrained(sys.argv[1])
except ValueError as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
@pytest.mark.parametrize("kind", ["shared regions", "numbers", "texts", "unknown names"])
def test_a_small_file_takes_little_memory(kind, tmp_path):
    """1 MB each; entries that share a region took 3.5 GB when they were dequantised before they were checked."""
    path, metadata, matrix = tmp_path / "a.gguf", llama_metadata(), bytes(1 << 20)
    if kind == "numbers":
        write_gguf(path, metadata | {"a": array(0, len(matrix), matrix)}, {})
    elif kind == "texts":
        write_gguf(path, metadata | {"a": array(8, len(matrix) // 8, matrix)}, {})
    elif kind == "unknown names":
        write_gguf(path, metadata, {"a": ((512, 512), 0, matrix)} | {f"a{n}": ((1,), 0, ONE) for n in range(1000)})
    else:
        write_gguf(path, metadata, {f"a{n}": ((512, 512), 0, b"" if n else matrix, 0) for n in range(3000)})
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(path)], capture_output=True, text=True, env=environment, check=True
    )
    grown, _, error = found.stdout.partition(" ")
    assert "a.gguf: " in error, found.stdout
    assert int(grown) < 100
