"""GGUF files, written byte by byte, so that a test can write what no library would."""

import struct

import torch

PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
BYTES = [chr(byte) for byte in PRINTABLE] + [chr(256 + n) for n in range(256 - len(PRINTABLE))]
"""GPT-2's names of the 256 bytes."""

LAYERS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate"}
LAYERS |= {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.o_proj": "attn_output"}
LAYERS |= {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"}
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
WHOLE |= {"lm_head.weight": "output.weight"}


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(given):
    if isinstance(given, bytes):  # type and content as they are
        return given
    if isinstance(given, bool):
        return struct.pack("<I?", 7, given)
    if isinstance(given, str):
        return struct.pack("<I", 8) + string(given)
    if isinstance(given, list):
        if given and isinstance(given[0], str):
            return struct.pack("<IIQ", 9, 8, len(given)) + b"".join(map(string, given))
        return struct.pack("<IIQ", 9, 5, len(given)) + struct.pack(f"<{len(given)}i", *given)
    return struct.pack("<If", 6, given) if isinstance(given, float) else struct.pack("<II", 4, given)


def write_gguf(path, metadata, tensors):
    """A file of version 3; tensors are (shape, format number, bytes), and an offset where not the next."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    header += b"".join(string(name) + value(given) for name, given in metadata.items())
    content = b""
    for name, (shape, form, stored, *offset) in tensors.items():
        header += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += struct.pack("<IQ", form, *(offset or [len(content)]))
        content += stored + bytes(-len(stored) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + content)
    return path


def llama_metadata(**optional):
    """Metadata of a Llama of two layers with 97 tokens."""
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6}
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": [str(index) for index in range(97)]}
    return metadata | {f"llama.{name}": given for name, given in (sizes | optional).items()}


def llama_tensors(state):
    """The tensors of a transformers state dict of this Llama, in float32."""
    tensors = {}
    for name, given in state.items():
        part = next((part for part in LAYERS if part in name), None)
        stored = WHOLE.get(name) or f"blk.{name.split('.')[2]}.{LAYERS[part]}.weight"
        if part in ("self_attn.q_proj", "self_attn.k_proj"):  # the two rows of a rotated pair are adjacent
            given = given.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)
        tensors[stored] = (tuple(given.shape), 0, given.contiguous().numpy().tobytes())
    return tensors


def random_llama():
    """Tensors of a random Llama, without transformers."""
    torch.manual_seed(0)
    shapes = {"model.embed_tokens": (97, 32), "lm_head": (97, 32), "model.norm": (32,)}
    for layer in range(2):
        parts = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32)}
        parts |= {"self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32)}
        parts |= {"mlp.down_proj": (32, 48), "input_layernorm": (32,), "post_attention_layernorm": (32,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return llama_tensors({f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()})


def tokenizer_metadata(extra=(), merges=(), **options):
    """Byte pairs with the 256 bytes, then `extra`, then the special tokens <s> and </s>."""
    tokens = [*BYTES, *extra, "<s>", "</s>"]
    given = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "merges": list(merges)}
    given |= {"token_type": [1] * (len(tokens) - 2) + [3, 3]}
    given |= {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
    return {"general.architecture": "llama"} | {
        f"tokenizer.ggml.{name}": each for name, each in (given | options).items()
    }
