"""Swin: logits and gradients of transformers' model, and shifted windows against a dense computation with a mask."""

import math

import pytest
import torch

import python_ref
import transformer_kernels as tk
from python_ref import ops
from python_ref.swin import SwinBlock, joined, windows

SIZES = {"image": 32, "channels": 3, "patch": 2, "side": 4, "depths": (2, 1, 2), "classes": 5, "width": 12, "heads": 3}


def make(**changes):
    """A model whose biases are not zero."""
    torch.manual_seed(0)
    model = python_ref.build("swin_digits", **{**SIZES, **changes}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def their_state(model):
    """Our weights under the names of transformers."""
    state = {}
    config, blocks = model.config, iter(model.blocks)
    ours = dict(model.named_parameters())
    patches = (config.width, config.channels, config.patch, config.patch)
    state["swin.embeddings.patch_embeddings.projection.weight"] = ours["embedding.projection.weight"].view(patches)
    state["swin.embeddings.patch_embeddings.projection.bias"] = ours["embedding.projection.bias"]
    layers = {"swin.embeddings.norm": model.embedding.norm, "swin.layernorm": model.final_norm}
    layers["classifier"] = model.classifier
    for stage, depth in enumerate(config.depths):
        for number in range(depth):
            block, name = next(blocks), f"swin.encoder.layers.{stage}.blocks.{number}."
            inner = block.inner
            state[name + "attention.relative_position_bias.relative_position_bias_table"] = block.relative_bias
            for kind in ("weight", "bias"):
                parts = zip("qkv", getattr(inner.attention.qkv, kind).chunk(3), strict=True)
                state |= {f"{name}attention.{part}_proj.{kind}": value for part, value in parts}
            layers |= {
                name + "layernorm_before": inner.attention_norm,
                name + "layernorm_after": inner.feed_forward_norm,
            }
            layers |= {name + "attention.o_proj": inner.attention.out, name + "mlp.fc2": inner.feed_forward.down}
            layers[name + "mlp.fc1"] = inner.feed_forward.up
        if stage + 1 < len(config.depths):
            merge, name = model.merges[stage], f"swin.encoder.layers.{stage}.downsample."
            state |= {name + "norm.weight": merge.norm_weight, name + "norm.bias": merge.norm_bias}
            state[name + "reduction.weight"] = merge.projection.weight
    state |= {f"{name}.{kind}": getattr(layer, kind) for name, layer in layers.items() for kind in ("weight", "bias")}
    return {name: value.detach().clone() for name, value in state.items()}


def test_logits_and_gradients_are_those_of_transformers():
    """Stages of 8 x 8 and 4 x 4 windows' tokens with and without a shift, and one whose grid is a single window."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours = make()
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=12, depths=[2, 1, 2], num_heads=[3, 6, 12], window_size=4, num_labels=5,
        drop_path_rate=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    theirs = transformers.SwinForImageClassification(config).double()
    missing, unexpected = theirs.load_state_dict(their_state(ours), strict=False)
    assert not unexpected and all("bias_index" in name or "position_index" in name for name in missing), missing
    images, labels = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([1, 4])
    torch.testing.assert_close(ours(images), theirs(images).logits, rtol=1e-6, atol=1e-6)  # softmax in float32
    ours.loss(images, labels).backward()
    torch.nn.functional.cross_entropy(theirs(images).logits, labels).backward()
    gradients = dict(theirs.named_parameters())
    for parameter in ours.parameters():
        parameter.data = parameter.grad
    for name, gradient in their_state(ours).items():
        torch.testing.assert_close(gradient, gradients[name].grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("grid", "side", "shift"), [(8, 4, 0), (8, 4, 2), (6, 3, 1), (4, 4, 0)])
def test_shifted_windows_are_a_dense_attention_with_a_mask_and_a_bias(grid, side, shift):
    """In the image, windows begin at `shift`, `shift + side`, ..., and those at the border are smaller."""
    model = make()
    block = SwinBlock(model.config.of_stage(0), ops, grid=grid, side=side, shift=shift).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, grid, grid, 12, dtype=torch.float64)
    row, column = (each.flatten() for each in torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij"))
    window = (row - shift).div(side, rounding_mode="floor") * 100 + (column - shift).div(side, rounding_mode="floor")
    bias = torch.full((3, grid**2, grid**2), -math.inf, dtype=torch.float64)
    for query in range(grid**2):
        for key in (window == window[query]).nonzero().flatten().tolist():
            down, right = (row[query] - row[key]).item(), (column[query] - column[key]).item()
            bias[:, query, key] = block.relative_bias[(down + side - 1) * (2 * side - 1) + right + side - 1]
    mask = {"causal": False, "key_padding_mask": None, "cu_seqlens": None}
    stream, branch = block.inner(x.flatten(1, 2), attn_bias=bias[None], **mask)
    torch.testing.assert_close(block(x), (stream + branch).view_as(x))


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_backends_agree(backend):
    plain, fused = make().float(), tk.build("swin_digits", backend, **SIZES)
    fused.load_state_dict(plain.state_dict())
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 4])
    for model in (plain, fused):
        model.loss(images, labels).backward()
    torch.testing.assert_close(fused(images), plain(images), rtol=1e-4, atol=1e-4)
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


def test_windows_are_squares_of_the_grid():
    x = torch.arange(32).view(1, 4, 8, 1)
    assert windows(x, 2)[:2].squeeze(-1).tolist() == [[0, 1, 8, 9], [2, 3, 10, 11]]
    assert torch.equal(joined(windows(x, 2), 2, 4, 8), x)


def test_sizes_are_those_of_the_paper():
    """Swin-T has 29 million parameters and takes 4.5 billion multiplications and additions per image (table 1)."""
    with torch.device("meta"):
        model = python_ref.build("swin_tiny")
    assert model.num_parameters() == 28_288_354
    per_image = model.flops_per_token(training=False) * model.config.context / 2
    assert per_image == pytest.approx(4.5e9, rel=0.01)
    assert model.flops_per_token() == 3 * model.flops_per_token(training=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": 5}, "patch must divide image; got patches of 5 in images of 32"),
        (
            {"side": 5},
            "side must divide the grid of each stage, .* got a grid of 16 x 16 tokens in stage 0 with side=5",
        ),
        ({"depths": (1,) * 6}, "a grid that is merged must be even; got a grid of 1 x 1 tokens in stage 4"),
        ({"depths": (2, 0)}, "depths must be at least 1; got 0"),
        ({"depths": ()}, "depths must be at least 1; got 0"),
        ({"norm": "post"}, "norm must be 'pre' and positions 'learned'; got 'post'"),
        ({"positions": "rotary"}, "norm must be 'pre' and positions 'learned'; got 'pre' and 'rotary'"),
    ],
)
def test_configurations_that_make_no_model(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_images_of_another_shape():
    with pytest.raises(ValueError, match=r"Swin: images must have shape \(batch, 3, 32, 32\); got \(2, 3, 16, 16\)"):
        make()(torch.zeros(2, 3, 16, 16, dtype=torch.float64))
