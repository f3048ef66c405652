"""The vision transformer: how a picture becomes tokens, and that transformers computes the same."""

import pytest
import torch
import torch.nn.functional as F

import python_ref
from python_ref import ViTConfig
from python_ref.vit import image_patches


def test_patches_are_those_of_a_strided_convolution():
    model = python_ref.build("vit_digits", image=12, channels=3, patch=4, width=8, heads=2).eval()
    images = torch.randn(2, 3, 12, 12)
    projection = model.embedding.projection
    wanted = F.conv2d(images, projection.weight.view(8, 3, 4, 4), projection.bias, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(projection(image_patches(images, 4)), wanted)
    assert model.embedding(images).shape == (2, 10, 8)
    assert model.config.context == 10


def test_the_classifier_reads_the_class_token_which_sees_every_patch():
    torch.manual_seed(0)
    model = python_ref.build("vit_digits", init_std=0.3).eval()
    images = torch.randn(3, 1, 8, 8, requires_grad=True)
    logits, maps = model(images, return_attention=True)
    assert logits.shape == (3, 10)
    assert [tuple(weights.shape) for weights in maps] == [(3, 4, 17, 17)] * 4
    (gradient,) = torch.autograd.grad(logits[1].square().sum(), images)
    assert (gradient[1] != 0).all()
    assert (gradient[[0, 2]] == 0).all()
    torch.testing.assert_close(logits, model.classifier(model.hidden_states(images)[:, 0]))


NAMES = {  # ours, and transformers'
    "embedding.class_token": "vit.embeddings.cls_token",
    "embedding.positions": "vit.embeddings.position_embeddings",
    "embedding.projection": "vit.embeddings.patch_embeddings.projection",
    "final_norm": "vit.layernorm",
    "attention_norm": "layernorm_before",
    "feed_forward_norm": "layernorm_after",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
    "attention.out": "attention.o_proj",
    "blocks.": "vit.layers.",
}


def test_logits_are_those_of_transformers():
    pytest.importorskip("transformers")
    from tests.support.transformers_models import inputs, make

    theirs = make("vit").eval()
    config = theirs.config
    model = python_ref.build(
        "vit_base",
        image=config.image_size,
        channels=config.num_channels,
        patch=config.patch_size,
        classes=config.num_labels,
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        ffn_width=config.intermediate_size,
        norm_eps=config.layer_norm_eps,
    ).eval()
    weights = theirs.state_dict()
    for name, parameter in model.named_parameters():
        source = name
        for ours, other in NAMES.items():
            source = source.replace(ours, other)
        parts = [source.replace("qkv", f"{part}_proj") for part in "qkv"] if "qkv" in source else [source]
        with torch.no_grad():
            parameter.copy_(torch.cat([weights[part] for part in parts]).view_as(parameter))
    images = inputs("vit")["pixel_values"]
    torch.testing.assert_close(model(images), theirs(images).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": 3}, "patch must divide image; got patches of 3 in images of 8"),
        ({"positions": "rotary"}, "positions must be 'learned'; got 'rotary'"),
        ({"classes": 0}, "classes must be at least 1; got 0"),
    ],
)
def test_bad_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ViTConfig(**{"image": 8, "patch": 2, "classes": 10, "width": 8, "layers": 1, "heads": 2, **changes})


def test_images_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"images must have shape \(batch, 1, 8, 8\); got \(2, 1, 8, 9\)"):
        python_ref.build("vit_digits")(torch.zeros(2, 1, 8, 9))
