"""Speedup of patched models of transformers and torch.nn over the same models unpatched.

    python -m benchmarks.patched [--models gpt2,llama] [--modes train,eval,short,generate] [--modules | --accelerate]

Minimum CPU time of many interleaved calls, which is robust to other load. `--modules` shows each kind of module of a
forward pass instead: where the ratio is below 1, small inputs run PyTorch's module (`patching/_swap.py`,
`ops/_crossovers.py`). `--accelerate` compares the unpatched model with itself inside `accelerate`, under autocast to
bfloat16, and in both.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import transformer_kernels as tk

LAYERS, WIDTH, HEADS, TOKENS = 4, 256, 4, 1000
COMMON = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
    "vocab_size": TOKENS,
}
GROUPED = {**COMMON, "num_key_value_heads": HEADS // 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", COMMON),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 4 * WIDTH, "vocab_size": TOKENS},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**COMMON, **dict.fromkeys((f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep")), 0)},
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": TOKENS}),
    "gpt2-lora": ("GPT2LMHeadModel", {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": TOKENS}),
    "gpt2-124m": ("GPT2LMHeadModel", {}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": WIDTH // HEADS}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": WIDTH, "d_kv": 64, "d_ff": 4 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS,
         "vocab_size": TOKENS, "decoder_start_token_id": 0},
    ),
    "vit": ("ViTForImageClassification", {**COMMON, "image_size": 128}),
    "torch.nn": ("", {}),
}  # fmt: skip
GENERATE = ("gpt2", "gpt2-124m", "llama", "mistral", "gemma2", "t5")
SHAPES = {"train": (8, 128), "eval": (32, 64), "short": (1, 16), "generate": (1, 16)}
NEW_TOKENS = 32
Call = Callable[[], Any]


def built(name: str) -> nn.Module:
    """A model with random weights, whose attention is PyTorch's."""
    if name == "torch.nn":
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
        return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    import transformers

    kind, options = MODELS[name]
    made: Any = getattr(transformers, kind)
    attention = "eager" if name == "gemma2" else "sdpa"  # SDPA lacks its soft cap
    model = made._from_config(made.config_class(**options), attn_implementation=attention)
    if name == "gpt2-lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True))
    return model


def inputs(name: str, mode: str) -> dict[str, Any]:
    """The keyword arguments of a model in a mode."""
    batch, length = SHAPES[mode]
    if name == "torch.nn":
        return {"src": torch.randn(batch, length, WIDTH)}
    if name == "vit":
        given: dict[str, Any] = {"pixel_values": torch.randn(batch, 3, 128, 128)}
        return given | ({"labels": torch.zeros(batch, dtype=torch.long)} if mode == "train" else {})
    tokens = torch.randint(5, TOKENS, (batch, length))
    if mode == "generate":
        return {"input_ids": tokens}
    given = {"input_ids": tokens} | ({"labels": tokens} if mode == "train" else {})
    return given | ({"decoder_input_ids": tokens} if name == "t5" and mode != "train" else {})


def call(model: Any, given: dict[str, Any], mode: str) -> Any:
    """One training pass, forward pass or generation."""
    if mode == "train":
        model.train()
        out = model(**given)
        loss = out.square().mean() if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        return loss
    model.eval()
    with torch.no_grad():
        if mode == "generate":
            return model.generate(**given, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0)
        return model(**given)


def accelerated(model: Any, given: dict[str, Any], mode: str) -> dict[str, list[Call]]:
    """One row: the call in float32 and under autocast, plain and in `accelerate`."""

    def within(block: Any, autocast: bool) -> Any:
        with block, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return call(model, given, mode)

    blocks = (nullcontext(), tk.accelerate())
    return {mode: [partial(within, block, autocast) for autocast in (False, True) for block in blocks]}


def least(calls: list[Call], seconds: float) -> list[float]:
    """The minimum CPU milliseconds of each call, interleaved for some seconds."""
    best = [float("inf")] * len(calls)
    for run in calls:
        run()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for index, run in enumerate(calls):
            start = time.process_time()
            run()
            best[index] = min(best[index], 1000 * (time.process_time() - start))
    return best


def modules(plain: nn.Module, patched: nn.Module, given: dict[str, Any]) -> Iterator[tuple[str, list[Call]]]:
    """Each kind of patched module by name, and calls of one module in both models with its recorded inputs."""
    seen: list[dict[str, Call]] = []
    for model in (plain, patched):
        found: dict[str, Call] = {}

        def keep(name: str, found: dict[str, Call], module: nn.Module, args: Any, kwargs: Any) -> None:
            found.setdefault(name, partial(module, *args, **kwargs))

        hooks = [
            module.register_forward_pre_hook(partial(keep, name, found), with_kwargs=True)
            for name, module in model.named_modules()
        ]
        call(model, given, "eval")
        for hook in hooks:
            hook.remove()
        seen.append(found)
    kinds = set()
    for name, module in patched.named_modules():
        mixin = getattr(type(module), "_mixin", None)
        kind = f"{type(module).__name__} by {mixin.__name__}" if mixin is not None else ""
        if kind and kind not in kinds and name in seen[0] and name in seen[1]:
            kinds.add(kind)
            yield kind, [found[name] for found in seen]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas; gpt2-lora needs peft")
    parser.add_argument("--modes", default=",".join(SHAPES), help="train, eval, short, generate")
    parser.add_argument("--modules", action="store_true", help="each kind of module instead of whole models")
    parser.add_argument("--accelerate", action="store_true", help="accelerate and autocast instead of patch")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    columns = ("plain", "accelerate", "autocast", "both") if options.accelerate else ("plain", "patched")
    print(f"{'model':12s} {'mode':9s} {' '.join(f'{name:>10s}' for name in columns)}  plain / each")
    for name in options.models.split(","):
        torch.manual_seed(0)
        plain = built(name)
        patched = copy.deepcopy(plain)
        tk.patch(patched)
        for mode in options.modes.split(","):
            if mode == "generate" and name not in GENERATE:
                continue
            given = inputs(name, mode)
            if options.accelerate:
                rows = accelerated(plain, given, mode)
            elif options.modules:
                rows = dict(modules(plain, patched, given))
            else:
                rows = {mode: [partial(call, model, given, mode) for model in (plain, patched)]}
            for label, calls in rows.items():
                with torch.set_grad_enabled(mode == "train" and not options.modules):
                    found = least(calls, options.seconds)
                ratios = " ".join(f"{found[0] / max(ms, 1e-9):6.2f}" for ms in found[1:])
                print(f"{name:12s} {label:9s} {' '.join(f'{ms:10.2f}' for ms in found)} {ratios}", flush=True)


if __name__ == "__main__":
    main()
