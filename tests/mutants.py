"""Planted bugs: edits applied one at a time to a copy of the sources, each of which must make a named test fail.

    python -m tests.mutants                    all
    python -m tests.mutants --sample 4         a sample that changes with the day of the last commit (`--seed` repeats
                                               it), without those that need two minutes of compilation

Prints one line each: caught, or MISSED with the edit. Exits 1 if one was missed or an edit no longer applies.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.support.day import day

ROOT = Path(__file__).parents[1]
NEEDED = ("python_ref", "transformer_kernels", "csrc", "tests", "benchmarks", "examples", "pyproject.toml", "README.md")
PACKAGE, OPS, TRAINING = "transformer_kernels", "transformer_kernels/ops", "transformer_kernels/training"


class Mutant(NamedTuple):
    """In `file`, the first `old` becomes `new`; `tests` are pytest's arguments, one of which must then fail."""

    file: str
    old: str
    new: str
    tests: str


AUTOGRAD = "tests/test_autograd.py"
DERIVATIVES = "tests/ops/test_derivatives.py"
EVERY = "tests/ops/test_every_operation.py"

MUTANTS = [
    # The routes
    Mutant(f"{OPS}/_operation.py", "if is_differentiated_again():", "if False:", f"{DERIVATIVES} -k gradgradcheck"),
    Mutant(
        f"{OPS}/_derivatives.py",
        '"create_graph": create_graph',
        '"create_graph": False',
        f"{DERIVATIVES} -k gradgradcheck",
    ),
    Mutant(
        f"{OPS}/_derivatives.py",
        "given = [x if x is None else x.view_as(x) for x in inputs]",
        "given = list(inputs)",
        f"{DERIVATIVES} -k given_twice",
    ),
    Mutant(
        f"{OPS}/_derivatives.py",
        "if recorded and not functorch_is_active()",
        "if False and not functorch_is_active()",
        f"{DERIVATIVES} -k memory",
    ),
    Mutant(
        f"{OPS}/_derivatives.py",
        "(recorded and not stack)",
        "False",
        f"{DERIVATIVES} -k gradgradcheck",
    ),
    Mutant(
        f"{OPS}/_tangents.py",
        "if any(x is not None for x in grads[public:]) or",
        "if",
        f"{DERIVATIVES} -k outputs_that_have_tangents",
    ),
    Mutant(
        f"{OPS}/_operation.py",
        "first = torch.zeros_like(results[self.kept_results[0]])",
        "first = torch.ones_like(results[self.kept_results[0]])",
        "tests/ops/test_add_layer_norm.py -k one_output_is_used",
    ),
    Mutant(
        f"{OPS}/_operation.py",
        "apart.append(tensor.clone() if address in seen and tensor.numel() else tensor)",
        "apart.append(tensor)",
        f"{AUTOGRAD} -k opcheck",
    ),
    Mutant(
        f"{OPS}/_operation.py",
        "first = self.call.gradient_layout(first)",
        "pass",
        f"{EVERY} -k 'gradient_of_any_layout and torch'",
    ),
    Mutant(
        f"{OPS}/_operation.py",
        "ctx.made_ahead = False",
        "ctx.made_ahead = True",
        "tests/ops/test_cross_entropy.py -k 'second_backward and cpu'",
    ),
    Mutant(
        f"{OPS}/_operation.py",
        "if layout is None and is_transformed(self.flat(call)):",
        "if False:",
        f"{DERIVATIVES} -k 'test_transforms and gelu'",
    ),
    Mutant(
        f"{PACKAGE}/backends/dispatch.py",
        'return kernels_of(operation, "torch" if call.is_empty() else name)',
        'return kernels_of(operation, "torch")',
        "tests/test_dispatch.py tests/test_nn.py -k 'backend'",
    ),
    Mutant(f"{PACKAGE}/backends/dispatch.py", "_scoped.reset(token)", "pass", "tests/test_dispatch.py"),
    # PyTorch
    Mutant(
        f"{OPS}/attention/_torch_scores.py",
        "tril_(first + right)",
        "tril_(first + right + 1)",
        "tests/ops/test_attention.py -k 'over_lengths and torch-float32 and causal'",
    ),
    Mutant(
        f"{OPS}/attention/_torch_scores.py",
        "triu_(first - left)",
        "triu_(first - left - 1)",
        "tests/ops/test_attention.py -k 'all_masks and torch-float32'",
    ),
    Mutant(
        f"{OPS}/attention/_torch_scores.py",
        "tril_(first + right)",
        "tril_(first + left)",
        "tests/ops/test_attention.py -k 'unequally and torch-float32'",
    ),
    Mutant(
        f"{OPS}/attention/_common.py",
        "if call.scores.cu_seqlens_k is not None:",
        "if False:",
        "tests/ops/test_attention.py -k lacks",
    ),
    Mutant(
        f"{OPS}/attention/_torch.py",
        "_forward(_within(span, keys, call), (span.start, keys.start))",
        "_forward(_within(span, keys, call), (span.start, span.start))",
        "tests/ops/test_attention.py -k otherwise",
    ),
    Mutant(
        f"{OPS}/attention/_torch_chunks.py",
        "dbias = None if bias is None else torch.zeros_like(bias, dtype=wide,",
        "dbias = None if bias is None else torch.zeros_like(bias,",
        "tests/ops/test_attention.py -k 'summed_over_chunks and torch'",
    ),
    Mutant(
        f"{OPS}/loss/_chunked.py",
        "return (first @ second).to(_wide(first.dtype))",
        "return first @ second",
        "tests/ops/test_linear_cross_entropy.py -k summed_in_float32",
    ),
    Mutant(
        f"{OPS}/loss/_chunked.py",
        "dlogits.mul_(scale[rows])",
        "dlogits.mul_(scale[: len(dlogits)])",
        "tests/ops/test_linear_cross_entropy.py -k 'gradcheck and none'",
    ),
    Mutant(
        f"{OPS}/_dropout.py",
        "return round(p * 2**16)",
        "return round(p * 2**16) + 1",
        "tests/ops/test_add_layer_norm.py -k 'reaches_the_threshold and triton'",
    ),
    Mutant(
        f"{OPS}/loss/_torch.py",
        "add_(lse, alpha=2.0 * options.z_loss)",
        "add_(lse, alpha=options.z_loss)",
        "tests/ops/test_cross_entropy.py -k options_match",
    ),
    Mutant(
        f"{OPS}/attention/_torch.py",
        "lse = lse.masked_fill(mask.amax(dim=-1) == -math.inf, -math.inf)",
        "lse = lse.clone()",
        "tests/ops/test_attention.py -k 'see_nothing and torch-float32'",
    ),
    Mutant(
        f"{OPS}/attention/_torch_chunks.py",
        "dq[chunk] = (dproducts @ key).mul_(scale)",
        "dq[chunk] = dproducts @ key",
        f"{EVERY} -k 'gradcheck and attention'",
    ),
    Mutant(
        f"{OPS}/loss/_torch.py",
        "p.sub_(label_smoothing / p.shape[1])",
        "pass",
        "tests/ops/test_cross_entropy.py -k 'torch and has_no_part'",
    ),
    Mutant(
        f"{OPS}/_checks.py",
        "if not cpu.within(value, count):",
        "if not cpu.within(value, count + 1):",
        "tests/ops/test_embedding.py -k 'unknown_id and torch'",
    ),
    Mutant(
        f"{OPS}/attention/_torch_chunks.py",
        "part.add_(dscores.sum_to_size(part.shape))",
        "part.add_(dproducts.sum_to_size(part.shape))",
        "tests/ops/test_attention.py -k 'softcap and torch-float32'",
    ),
    # Triton, interpreted
    Mutant(
        f"{OPS}/attention/_triton_scores.py",
        "slope = 1.0 - ratio * ratio",
        "slope = 1.0 - ratio",
        "tests/ops/test_attention.py -k 'softcap and triton-float16'",
    ),
    Mutant(
        f"{OPS}/attention/_triton_scores.py",
        "scores = limit * tanh(scores / limit, OPTIONS.NATURAL)",
        "scores = scores * 1.0",
        "tests/ops/test_attention_triton.py -k 'decode_splits and softcap'",
    ),
    Mutant(
        f"{OPS}/attention/_triton_masks.py",
        "start = tl.maximum(0, first_key - shift - stage.numbers.right)",
        "start = tl.maximum(0, first_key - shift - stage.numbers.left)",
        "tests/ops/test_attention_triton.py -k unequal_window",
    ),
    Mutant(
        f"{OPS}/attention/_triton_scores.py",
        "distance = first_row + rows + (stage.numbers.key_length - stage.numbers.query_length) - start - columns",
        "distance = first_row + rows - start - columns",
        "tests/ops/test_attention_triton.py -k unequal_window",
    ),
    Mutant(
        f"{OPS}/attention/_triton_decode.py",
        "row_sum = row_sum * correction + tl.sum(weights * part_sum, 0)",
        "row_sum = row_sum + tl.sum(weights * part_sum, 0)",
        "tests/ops/test_attention_triton.py -k decode_of_batches",
    ),
    Mutant(
        f"{OPS}/activation/_triton.py",
        "inside = lanes < count - start",
        "inside = lanes <= count - start",
        "tests/ops/test_gelu.py tests/ops/test_gelu_triton.py -k triton",
    ),
    Mutant(
        f"{OPS}/activation/_triton.py",
        "dbias_sum += gradient",
        "dbias_sum = gradient",
        "tests/ops/test_bias_gelu.py tests/ops/test_bias_gelu_triton.py -k triton",
    ),
    Mutant(
        f"{OPS}/norm/_triton.py",
        "row_rstd = tl.rsqrt(variance + eps)",
        "row_rstd = tl.rsqrt(variance)",
        "tests/ops/test_layer_norm.py tests/ops/test_layer_norm_triton.py -k triton",
    ),
    # CUDA, emulated
    Mutant(
        "csrc/cuda/launchers/softmax.cu",
        "all_aligned<T>(n, gradient, output, result)",
        "all_aligned<T>(n, output, result)",
        f"{EVERY} -k 'gradient_of_any_layout and cuda-softmax'",
    ),
    Mutant(
        "csrc/cuda/launchers/attention.cu",
        "tensor.head * element_bytes % 16 == 0 && ",
        "",
        "tests/ops/test_attention_cuda.py -k begin_off_16_bytes",
    ),
    Mutant(
        "csrc/cuda/kernels/attention_forward_sm90.cuh",
        "barrier_wait(keys_full + stage, at.step / STAGES % 2);",
        "barrier_wait(keys_full + stage, at.step / STAGES > 0);",
        "tests/ops/test_attention_cuda.py -k fills_each_stage",
    ),
    Mutant(
        "csrc/cuda/kernels/attention_forward_sm90.cuh",
        "fence_for_async();",
        "",
        "tests/ops/test_attention_cuda.py -k sm90",
    ),
    *(
        Mutant(
            "csrc/cuda/kernels/attention_forward_sm90.cuh",
            old,
            new,
            "tests/ops/test_attention_cuda.py -k persistent_grid_matches",
        )
        for old, new in (
            ("if (group == 1) pass_turn();", ""),
            ("if (group == 0) wait_for_turn();", ""),
            ("if (PERSISTENT) barrier_wait(queries_empty", "if (false) barrier_wait(queries_empty"),
            ("fence_for_async();\n    release(queries_empty", "release(queries_empty"),
            ("if (PERSISTENT) release(values_empty", "if (false) release(values_empty"),
        )
    ),
    Mutant(
        "csrc/cuda/kernels/attention_scores.cuh",
        "reinterpret_cast<const uint32_t*>(rows[half]) + first_key / 2;",
        "reinterpret_cast<const uint32_t*>(rows[half]);",
        "tests/ops/test_attention_cuda.py -k sm90_with_a_bias",
    ),
    Mutant(
        "csrc/emulation/tensor_core.cpp",
        "architecture < 90 ? 24 : 25",
        "24",
        "tests/emulation/test_conformance.py -k 90",
    ),
    Mutant(
        "csrc/emulation/proxies.cpp",
        "known[writer] <= mine.its_fences",
        "proxies.known[writer][writer] <= mine.its_fences",
        "tests/emulation/test_planted_bugs.py -k after_fence",
    ),
    Mutant(
        "csrc/cuda/kernels/cross_entropy_forward.cuh",
        "if (column + i < classes) distance += score;",
        "distance += score;",
        "tests/ops/test_row_kernels_cuda.py -k lies_between",
    ),
    Mutant(
        "csrc/cuda/kernels/cross_entropy_forward.cuh",
        "if (smoothing > 0.0f && column + i < classes) distance",
        "if (smoothing > 0.0f) distance",
        "tests/ops/test_row_kernels_cuda.py -k lies_between",
    ),
    # Found by tables of routes, strides and states
    Mutant(
        f"{OPS}/attention/_call.py",
        'check_starts("cu_seqlens_k", scores.cu_seqlens_k, keys)',
        'check_starts("cu_seqlens_k", scores.cu_seqlens_k, queries)',
        "tests/ops/test_plan.py -k 'every_route and attention'",
    ),
    Mutant(
        f"{OPS}/softmax/_triton.py",
        "vector_width(itemsize, *strides[:3])",
        "vector_width(itemsize, *strides[1:3])",
        "tests/ops/test_softmax.py -k 'any_strides and triton'",
    ),
    Mutant(
        f"{OPS}/attention/_torch.py",
        "(of_keys, scores.cu_seqlens_k)",
        "(of_keys, None)",
        "tests/ops/test_attention.py -k 'packed_otherwise and torch'",
    ),
    Mutant(
        f"{PACKAGE}/graphs/__init__.py",
        "leaf.dtype, leaf.device, leaf.requires_grad",
        "leaf.dtype, leaf.device",
        "tests/graphs/test_graphed.py -k gradients_do_not",
    ),
    Mutant(
        f"{PACKAGE}/patching/_swap.py",
        "module._backward_hooks or module._backward_pre_hooks",
        "module._backward_hooks",
        "tests/patching/test_models.py -k every_kind_of_hook",
    ),
    Mutant(
        f"{PACKAGE}/pretrained/generation.py",
        "penalised(scores, tokens[row][real[row]],",
        "penalised(scores, tokens[row],",
        "tests/test_generation.py -k past_the_context",
    ),
    # Training
    Mutant(
        f"{TRAINING}/data/sampler.py",
        "self.epoch, self.batch = self.epoch + 1, 0",
        "self.epoch, self.batch = self.epoch, 0",
        "tests/training/data/test_sampler.py",
    ),
    Mutant(
        f"{TRAINING}/data/sampler.py",
        "self.epoch, self.batch = checked_number(state",
        "self.epoch, self.batch = 0 * checked_number(state",
        "tests/training/data/test_sampler.py",
    ),
    Mutant(
        f"{TRAINING}/step.py",
        "self.scaler.scale(loss).backward()",
        "loss.backward()",
        "tests/training/loop/test_trainer.py tests/training/test_step.py",
    ),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, help="number of mutants (default: all)")
    parser.add_argument("--seed", default=day())
    parser.add_argument("--matching", default="", help="only mutants of files whose name contains this")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if arguments.matching in mutant.file]
    if arguments.sample is not None:
        print(f"seed {arguments.seed}")
        chosen = [mutant for mutant in chosen if not mutant.file.startswith("csrc")]
        chosen = random.Random(arguments.seed).sample(chosen, min(arguments.sample, len(chosen)))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        _copy_sources(copy)
        verdicts = [_verdict(mutant, copy) for mutant in chosen]
    missed = [verdict for verdict in verdicts if verdict != "caught"]
    print(f"{len(verdicts) - len(missed)} of {len(verdicts)} caught")
    return 1 if missed else 0


def _copy_sources(copy: Path) -> None:
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, copy / name)


def _verdict(mutant: Mutant, copy: Path) -> str:
    """Apply the edit, run its tests, restore the file."""
    path = copy / mutant.file
    original = path.read_text()
    if mutant.old not in original:
        verdict = "STALE: the edit no longer applies"
    else:
        path.write_text(original.replace(mutant.old, mutant.new, 1))
        command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider -m 'not slow' {mutant.tests}"
        own_cache = {"TRANSFORMER_KERNELS_CACHE": str(copy / "cache")} if mutant.file.startswith("csrc") else {}
        result = subprocess.run(
            command, shell=True, cwd=copy, capture_output=True, text=True, env={**os.environ, **own_cache}
        )
        path.write_text(original)
        # 1: a test failed; 0: none failed; 5: no test found; others: errors of pytest
        verdict = "caught" if result.returncode == 1 else f"MISSED (pytest exit {result.returncode})"
    print(f"{verdict}: {mutant.file}: {mutant.old!r} -> {mutant.new!r}", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
