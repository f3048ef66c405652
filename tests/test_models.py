"""The preset models have the same results with every set of operations, and can change it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import transformer_kernels as tk
from tests.support import parity
from transformer_kernels.ops.loss import _calls

SMALL = {"width": 16, "heads": 2, "layers": 2, "vocab_size": 23, "context": 12}
OPERATIONS = {
    "char_gpt": ("embedding", "attention", "add_layer_norm", "bias_relu"),
    "imdb_bert": ("embedding", "attention", "layer_norm", "add_layer_norm", "bias_gelu"),
    "gpt2": ("embedding", "attention", "layer_norm", "add_layer_norm", "bias_gelu"),
    "llama": ("embedding", "attention", "rms_norm", "add_rms_norm", "rotary", "swiglu"),
    "translator": ("embedding", "attention", "add_layer_norm", "bias_relu"),
}
SIZES = {
    "llama": {"kv_heads": 1, "ffn_width": 24, "dropout": 0.1},
    "translator": {"source_vocab_size": 19, "layers": 1, "ffn_width": 24, "dropout": 0.1},
}
SLOWLY = [pytest.param(backend, marks=pytest.mark.slow) for backend in ("triton", "cuda")]
"""Interpreted and emulated without a GPU: the graph has the same operators for every backend."""
TOKENS = torch.arange(24).view(2, 12) % 23
REAL = torch.arange(12) < torch.tensor([[12], [7]])
INPUTS = {"imdb_bert": (TOKENS, REAL), "translator": (TOKENS % 19, TOKENS, REAL)}


def require(name, backend):
    for op in OPERATIONS[name]:
        parity.require(op, backend, torch.device("cpu"), torch.float32)


def build(name, backend, **overrides):
    torch.manual_seed(0)
    return tk.build(name, backend, **{**SMALL, **SIZES.get(name, {}), **overrides})


def logits_of(model, name):
    return model(*INPUTS.get(name, (TOKENS,)))


def loss_of(model, name):
    logits = logits_of(model, name)
    if name == "imdb_bert":
        return F.cross_entropy(logits, torch.tensor([0, 1]))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def train(model, name, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, name)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("backend", [None, "auto", *tk.BACKENDS, "reference"])
def test_build_takes_every_backend(backend):
    model = tk.build("char_gpt", backend)
    assert model.num_parameters() == 807_745
    assert model.ops == tk.bind(backend)


@pytest.mark.parametrize("backend", tk.BACKENDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_training_with_dropout_gives_the_losses_of_the_reference(name, backend):
    require(name, backend)
    # executed slowly without a GPU; the second step follows an update
    layers, steps = (1, 2) if backend in ("triton", "cuda") else (SIZES.get(name, SMALL).get("layers", 2), 3)
    expected = train(build(name, "reference", layers=layers), name, steps)
    assert train(build(name, backend, layers=layers), name, steps) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_fifty_steps_stay_together(name):
    expected = train(build(name, "reference"), name, steps=50)
    assert train(build(name, "torch"), name, steps=50) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_those_of_the_reference(name):
    gradients = []
    for backend in ("torch", "reference"):
        model = build(name, backend, dropout=0.0).double()
        loss_of(model, name).backward()
        gradients.append({key: parameter.grad for key, parameter in model.named_parameters()})
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][key], rtol=1e-8, atol=1e-10, msg=key)


def model_loss(model, name, labels, smoothing):
    if name == "imdb_bert":
        return model.loss(labels, TOKENS, REAL, label_smoothing=smoothing)
    return model.loss(*INPUTS.get(name, (TOKENS,)), labels, label_smoothing=smoothing)


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize("rows", [None, 5], ids=["at once", "in chunks"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_loss_is_the_cross_entropy_of_the_logits(name, backend, smoothing, rows, monkeypatch):
    if rows is not None:
        monkeypatch.setattr(_calls, "rows_at_once", lambda *_: rows)
    labels = torch.tensor([1, -100]) if name == "imdb_bert" else TOKENS.roll(-1, 1).masked_fill(TOKENS % 5 == 0, -100)
    results = []
    for given in (True, False):
        model = build(name, backend, dropout=0.0).double()
        if given:
            loss = model_loss(model, name, labels, smoothing)
        else:
            logits = logits_of(model, name).flatten(0, -2)
            loss = F.cross_entropy(logits, labels.flatten(), label_smoothing=smoothing)
        loss.backward()
        results.append({key: p.grad for key, p in model.named_parameters()} | {"loss": loss.detach()})
    for key, expected in results[1].items():
        torch.testing.assert_close(results[0][key], expected, rtol=1e-8, atol=1e-10, msg=key)


def packed(lengths, room):
    """The rows of TOKENS truncated to these lengths and concatenated, then tokens that are no padding of a row."""
    tokens = torch.cat([TOKENS[row, :length] for row, length in enumerate(lengths)])
    filler = torch.arange(room - len(tokens)) + 3
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    position_ids = torch.cat([torch.arange(length) for length in lengths] + [torch.zeros_like(filler)])
    inputs = {"cu_seqlens": cu_seqlens, "position_ids": position_ids.unsqueeze(0)}
    return torch.cat([tokens, filler]).unsqueeze(0), inputs


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("backend", [*tk.BACKENDS, "reference"])
def test_packed_sequences_give_the_logits_and_gradients_of_padded_ones(backend, pooling):
    exact = backend in ("torch", "reference")
    if backend != "reference":
        require("imdb_bert", backend)
    tokens, inputs = packed([12, 7], room=24)
    results = []
    for is_packed in (True, False):
        model = build("imdb_bert", backend, dropout=0.0, pooling=pooling).to(torch.float64 if exact else torch.float32)
        try:
            logits = model(tokens, **inputs) if is_packed else model(TOKENS, REAL)
        except tk.UnsupportedByBackend as error:
            pytest.skip(str(error))
        (logits * torch.tensor([[1.0, -2.0], [3.0, 0.5]])).sum().backward()
        results.append({key: p.grad for key, p in model.named_parameters()} | {"logits": logits.detach()})
    for key, expected in results[1].items():
        close = {"rtol": 1e-8, "atol": 1e-10} if exact else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(results[0][key], expected, **close, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_packed_sequences_compile_without_a_break_in_the_graph(pooling):
    tokens, inputs = packed([12, 7], room=24)
    model = build("imdb_bert", "torch", dropout=0.0, pooling=pooling)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits = compiled(tokens, **inputs)
    torch.testing.assert_close(logits, model(tokens, **inputs))
    logits.sum().backward()


@pytest.mark.parametrize("name", OPERATIONS)
def test_state_dict_moves_between_operations(name):
    ours, theirs = build(name, "torch").eval(), build(name, "reference").eval()
    for parameter in theirs.parameters():
        torch.nn.init.zeros_(parameter)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(loss_of(ours, name), loss_of(theirs, name))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copy_keeps_its_operations(duplicate, backend):
    model = build("imdb_bert", backend).eval()
    twin = duplicate(model)
    assert twin.ops == model.ops == tk.bind(backend)
    assert torch.equal(twin(TOKENS, REAL), model(TOKENS, REAL))


@pytest.mark.parametrize("backend", ["torch", "cpu", *SLOWLY, "reference"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_compiles_without_a_break_in_the_graph(name, backend):
    if backend != "reference":
        require(name, backend)
    torch._dynamo.reset()  # every backend and model counts towards one limit of recompilations
    model = build(name, backend, dropout=0.0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(loss_of(compiled, name), loss_of(model, name))
    loss_of(compiled, name).backward()


@pytest.mark.parametrize("name", OPERATIONS)
def test_trains_under_autocast(name):
    model = build(name, "torch", dropout=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, name)
    loss.backward()
    exact = loss_of(model, name)
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_never_waits_for_the_device(name, backend):
    model = build(name, backend).cuda()
    inputs = [each.cuda() for each in INPUTS.get(name, (TOKENS,))]
    model(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_packed_sequences_never_wait_for_the_device(backend, pooling):
    model = build("imdb_bert", backend, pooling=pooling).cuda()
    tokens, inputs = packed([12, 7], room=24)
    labels, tokens = torch.tensor([0, 1]).cuda(), tokens.cuda()
    inputs = {name: tensor.cuda() for name, tensor in inputs.items()}
    model.loss(labels, tokens, **inputs).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.loss(labels, tokens, **inputs).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bound_model_asks_its_backend_only():
    model = build("gpt2", "torch")
    with tk.use_backend("cuda"):
        assert model(TOKENS).shape == (2, 12, 23)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_all_tensors_are_made_on_the_device_of_the_inputs(name, backend):
    """The meta device refuses tensors of another one, as a GPU would."""
    model = build(name, backend).to("meta")
    tokens = [each.to("meta") for each in INPUTS.get(name, (TOKENS,))]
    logits = model(*tokens)
    assert logits.device.type == "meta" and logits.shape == logits_of(build(name, backend), name).shape
    logits.sum().backward()
    assert all(parameter.grad.device.type == "meta" for parameter in model.parameters() if parameter.grad is not None)
