import pytest
import torch
from torch import nn

from tests.training.loop.test_graphs import assert_resuming_is_exact, kind, outcomes  # noqa: F401
from transformer_kernels.training import CharGPT, Processes, Trainer
from transformer_kernels.training.loop.muon import COEFFICIENTS, Muon, hidden_matrices, orthogonalised
from transformer_kernels.training.loop.optimisation import make_optimizer

OPTIONS = {"lr": 0.1, "weight_decay": 0.5, "betas": (0.9, 0.99)}
SHAPES = [(6, 6), (4, 12), (12, 4)]


def definition(matrix):
    """The Newton-Schulz polynomials of the singular values, float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm(4)
    for a, b, c in COEFFICIENTS:
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthogonalised_matches_the_polynomial_of_singular_values(shape):
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape)
    assert not orthogonalised(torch.zeros(1, *shape)).any()
    found = orthogonalised(matrices)
    for matrix, each in zip(matrices, found, strict=True):
        torch.testing.assert_close(each.double(), definition(matrix), rtol=1e-4, atol=1e-5)
        assert torch.linalg.svdvals(each)[:-1].sub(1).abs().max() < 0.5


def module():
    torch.manual_seed(0)
    return nn.ParameterList([torch.randn(shape) for shape in (*SHAPES, SHAPES[1], (5,), (3, 4))])


def train(parameters, optimizer, steps, scale=None):
    torch.manual_seed(1)
    for _ in range(steps):
        for each in parameters:
            each.grad = torch.randn_like(each)
        if scale is not None:
            optimizer.grad_scale = scale
        optimizer.step()


def test_steps_match_the_definition_in_float64():
    """And the parameters that are no matrices are updated as by AdamW."""
    parameters, expected, adamw = module(), module().double(), module()
    optimizer = Muon(parameters, parameters[:4], **OPTIONS, momentum=0.9)
    usual = torch.optim.AdamW(adamw, **OPTIONS, fused=True)
    train(parameters, optimizer, 3)
    train(adamw, usual, 3)
    torch.manual_seed(1)
    momenta = [torch.zeros_like(each) for each in expected]
    with torch.no_grad():
        for _ in range(3):
            for weight, momentum in zip(expected, momenta, strict=True):
                gradient = torch.randn(weight.shape).double()
                if weight.dim() < 2 or weight.shape == (3, 4):
                    continue
                momentum.mul_(0.9).add_(gradient, alpha=0.1)
                update = definition(0.1 * gradient + 0.9 * momentum) * 0.176 * max(weight.shape) ** 0.5
                weight -= 0.1 * (0.5 * weight + update)
    for found, wanted in zip(parameters[:4], expected[:4], strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(found, wanted) for found, wanted in zip(parameters[4:], adamw[4:], strict=True))
    assert all(set(optimizer.state[each]) == {"momentum"} for each in parameters[:4])


def test_a_gradient_scale_divides_the_gradients():
    plain, scaled = module(), module()
    optimizers = Muon(plain, plain[:4], **OPTIONS), Muon(scaled, scaled[:4], **OPTIONS)
    train(plain, optimizers[0], 1)
    train(scaled, optimizers[1], 1, torch.tensor(4.0))
    for each, other in zip(plain[:4], scaled[:4], strict=True):
        torch.testing.assert_close(optimizers[1].state[other]["momentum"] * 4, optimizers[0].state[each]["momentum"])


def test_hidden_matrices_are_the_linear_layers_of_the_blocks(char_config):
    model = CharGPT(char_config(model={"layers": 2, "width": 16, "heads": 2, "tied": False})).build_model()
    names = {id(each): name for name, each in model.named_parameters()}
    parts = ("attention.qkv", "attention.out", "feed_forward.up", "feed_forward.down")
    assert {names[id(each)] for each in hidden_matrices(model)} == {
        f"blocks.{layer}.{part}.weight" for layer in range(2) for part in parts
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_no_bit(char_config, kind, dtype):  # noqa: F811
    config = char_config(optimizer="muon", steps=12, dtype=dtype)
    results = []
    for graphs in (None, kind()):
        config.cuda_graph = "off" if graphs is None else "auto"
        trainer = Trainer(CharGPT(config), graphs=graphs)
        torch.manual_seed(1)
        results.append((outcomes(trainer, 12), [each.detach().clone() for each in trainer.model.parameters()]))
    assert graphs.replays == 9
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(*pair) for pair in zip(results[0][1], results[1][1], strict=True))


def test_resuming_is_exact(char_config, tmp_path):
    whole, half = (char_config(optimizer="muon", steps=12, out=str(tmp_path / name)) for name in ("whole", "half"))
    expected = assert_resuming_is_exact(*(lambda c=config: Trainer(CharGPT(c)) for config in (whole, half, half)))
    assert any(name.endswith(".momentum") for name in expected.optimizer)


def test_where_muon_is_impossible_is_refused(char_config):
    model = CharGPT(char_config()).build_model()
    with pytest.raises(ValueError, match=r"--optimizer muon .* got cpu and float16"):
        make_optimizer(model, char_config(optimizer="muon", dtype="float16"), torch.device("cpu"), Processes())
    with pytest.raises(ValueError, match=r"--optimizer muon .* got meta and float32"):
        make_optimizer(model.to("meta"), char_config(optimizer="muon"), torch.device("meta"), Processes())
