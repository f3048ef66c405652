"""Tests that require a GPU: graphs, streams, compiled execution, and tensors of more than 2^31 elements."""

import pytest
import torch
import torch.nn.functional as F

import transformer_kernels as tk
from tests.support.parity import require

pytestmark = pytest.mark.gpu

KERNELS = pytest.mark.parametrize("backend", ["triton", "cuda"])
CUDA = torch.device("cuda")


def test_auto_takes_a_kernel_and_says_so():
    q = torch.randn(2, 4, 128, 64, device=CUDA, dtype=torch.float16)
    assert tk.explain("attention", q, q, q).chosen in ("triton", "cuda")


@KERNELS
def test_a_captured_step_draws_new_dropout_at_each_replay(backend):
    require("add_layer_norm", backend, CUDA, torch.float32)
    x, residual, weight = (torch.randn(shape, device=CUDA) for shape in ((64, 128), (64, 128), (128,)))

    def step():
        return tk.add_layer_norm(x, residual, weight, dropout_p=0.5, backend=backend)[1]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        summed = step()
    results = []
    for _ in range(2):
        graph.replay()
        results.append(summed.clone())
    kept = [(result - residual).abs() > 1e-6 for result in results]
    assert not torch.equal(*kept)
    for mask in kept:
        assert 0.4 < mask.float().mean().item() < 0.6


@KERNELS
@pytest.mark.parametrize("name", ["char_gpt", "imdb_bert"])
def test_compiled_models_compute_the_same(name, backend):
    for op in ("attention", "layer_norm", "add_layer_norm", "bias_gelu", "bias_relu", "embedding"):
        require(op, backend, CUDA, torch.float32)
    torch.manual_seed(0)
    model = tk.build(name, backend, dropout=0.0, layers=2).to(CUDA)
    tokens = torch.randint(0, 60, (4, 64), device=CUDA)
    inputs = (tokens,) if name == "char_gpt" else (tokens, torch.ones_like(tokens, dtype=torch.bool))
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), model(*inputs), atol=1e-4, rtol=1e-4)
    compiled(*inputs).square().mean().backward()


@KERNELS
def test_kernels_run_on_the_current_stream(backend):
    require("gelu", backend, CUDA, torch.float32)
    x = torch.randn(1 << 22, device=CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = x * 2
        y = tk.gelu(late, backend=backend)
    stream.synchronize()
    torch.testing.assert_close(y, F.gelu(x * 2), atol=1e-5, rtol=1e-5)


@KERNELS
@pytest.mark.big
@pytest.mark.parametrize("op", ["gelu", "softmax", "layer_norm"])
def test_more_than_two_billion_elements(op, backend):
    require(op, backend, CUDA, torch.bfloat16)
    rows, columns = (1 << 21) + 3, 1024
    x = torch.empty(rows, columns, device=CUDA, dtype=torch.bfloat16).normal_()
    arguments = (torch.ones(columns, device=CUDA, dtype=torch.bfloat16),) if op == "layer_norm" else ()
    whole = getattr(tk, op)(x, *arguments, backend=backend)
    for part in (slice(0, 5), slice(rows - 5, rows)):
        torch.testing.assert_close(whole[part], getattr(tk, op)(x[part].clone(), *arguments, backend=backend))


@KERNELS
@pytest.mark.big
def test_attention_over_more_than_two_billion_elements(backend):
    require("attention", backend, CUDA, torch.bfloat16)
    batch = (1 << 17) + 1
    q = torch.empty(batch, 4, 64, 64, device=CUDA, dtype=torch.bfloat16).normal_()
    whole = tk.attention(q, q, q, causal=True, backend=backend)
    last = q[-2:].clone()
    torch.testing.assert_close(whole[-2:], tk.attention(last, last, last, causal=True, backend=backend))
