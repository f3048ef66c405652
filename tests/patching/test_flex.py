"""flex_attention of torch in `accelerate`, on the CPU, where PyTorch does not train it."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading

import pytest
import torch

import transformer_kernels as tk
from transformer_kernels import BackendUnavailable
from transformer_kernels.backends import cpu

try:
    cpu.load()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)
flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="this torch has no FlexAttention")
flex_attention = flex.flex_attention  # by name and before any block, as programs import it

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def operands():
    return [torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def causal():
    return flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40, device="cpu")


def test_it_trains_inside_a_block():
    ours = [x.requires_grad_() for x in operands()]
    with tk.accelerate() as block:
        out, aux = flex_attention(*ours, block_mask=causal(), return_aux=flex.AuxRequest(lse=True))
    out.sum().backward()
    assert [tuple(row) for row in block.report().rows] == [("attention", "cpu", None, 1)]
    wanted, lse = flex_attention(*operands(), block_mask=causal(), return_aux=flex.AuxRequest(lse=True))
    torch.testing.assert_close((out.detach(), aux.lse.detach()), (wanted, lse.lse))
    exact = [x.double().requires_grad_() for x in operands()]
    torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True).sum().backward()
    for x, y in zip(ours, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, atol=2e-6, rtol=1e-5)


def test_outside_a_block_and_in_another_thread_it_is_pytorchs():
    tensors, raised = [x.requires_grad_() for x in operands()], []

    def call():
        try:
            flex_attention(*tensors)
        except NotImplementedError as error:
            raised.append(str(error))

    with tk.accelerate():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    call()
    assert [error.partition(".")[0] for error in raised] == ["FlexAttention does not support backward on CPU"] * 2


def test_the_function_stays_the_object_that_it_is():
    signature, code = inspect.signature(flex_attention), flex_attention.__code__
    with tk.accelerate():
        assert flex.flex_attention is flex_attention
        assert copy.deepcopy(flex_attention) is pickle.loads(pickle.dumps(flex_attention)) is flex_attention
        with tk.accelerate():
            flex_attention(*operands())
        assert flex_attention.__code__ is not code
    assert flex_attention.__code__ is code
    assert inspect.signature(flex_attention) == signature


def test_other_calls_are_pytorchs():
    q, k, v = operands()
    with tk.accelerate() as block, pytest.raises(ValueError, match="same embedding dimension"):
        flex_attention(q[:0], k[:0, ..., :8], v[:0])
    assert [tuple(row) for row in block.report().rows] == [("attention", None, "an argument is empty", 1)]


def test_what_is_compiled_is_the_compilers():
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    with tk.accelerate() as block:
        out = compiled(*operands(), block_mask=causal())
    assert not block.report().rows
    torch.testing.assert_close(out, compiled(*operands(), block_mask=causal()))
