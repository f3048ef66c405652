"""The digits: the held-out part, learning, and commands that read pictures."""

import os
import struct
import zlib

import pytest
import torch

from python_ref import Swin
from transformer_kernels import cli
from transformer_kernels.training import Trainer
from transformer_kernels.training.recipes.vit import DigitsViT, VitConfig, read_image


@pytest.fixture
def config(tmp_path):
    """Makes configs that train in a moment."""

    def make(**changes):
        usual = {"out": str(tmp_path / "run"), "progress": False, "steps": 4, "model": {"layers": 1, "width": 32}}
        return VitConfig(**{**usual, **changes})

    return make


def test_every_digit_is_in_one_part(config):
    recipe = DigitsViT(config())
    assert torch.cat((recipe.training, recipe.held_out)).sort().values.tolist() == list(range(1797))
    assert len(recipe.held_out) == 360
    batch = recipe.batch(torch.arange(5), torch.device("cpu"))
    assert (batch.inputs[0].shape, batch.targets.shape, batch.tokens) == ((5, 1, 8, 8), (5,), 5 * 17)
    assert (recipe.images.min().item(), recipe.images.max().item()) == (-1.0, 1.0)
    with pytest.raises(ValueError, match=r"held_out must leave some of the 1,797 digits .*; got 1797"):
        config(held_out=1797)


def test_it_learns_and_the_commands_know_it(config, tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    trained = config(steps=150, lr=5e-3)
    assert Trainer(DigitsViT(trained)).fit().validation["accuracy"] > 0.7
    assert cli.main(["evaluate", "--checkpoint", trained.out]) == 0
    assert "on 360 targets" in capsys.readouterr().out
    recipe = DigitsViT(trained)
    known = [number for number in recipe.training.tolist() if recipe.labels[number] == 0][:8]
    paths = [str(tmp_path / f"{number}.png") for number in known]
    for number, path in zip(known, paths, strict=True):
        brightness = (recipe.images[number, 0] + 1) / 2
        image.fromarray((255 * brightness).byte().numpy()).resize((80, 80), image.Resampling.NEAREST).save(path)
    assert cli.main(["classify", "--checkpoint", trained.out, *paths]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()].count("0") >= 7
    assert cli.main(["classify", "--checkpoint", trained.out, "nothing.png"]) == 1
    assert "nothing.png" in capsys.readouterr().err


def test_swin_is_a_choice_of_the_model(config, capsys):
    trained = config(preset="swin_digits", steps=150, lr=5e-3, model={"width": 24})
    recipe = DigitsViT(trained)
    assert recipe.batch(torch.arange(5), torch.device("cpu")).tokens == 5 * 16  # there is no class token
    trainer = Trainer(recipe)
    assert isinstance(trainer.model, Swin) and trainer.fit().validation["accuracy"] > 0.7
    assert cli.main(["evaluate", "--checkpoint", trained.out]) == 0
    assert "on 360 targets" in capsys.readouterr().out


@pytest.mark.slow
def test_40_epochs_read_94_percent_of_what_was_held_out(tmp_path):
    config = VitConfig(out=str(tmp_path / "run"), progress=False)
    assert Trainer(DigitsViT(config)).fit().validation["accuracy"] >= 0.94


def test_ink_on_paper_is_inverted(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    bright = torch.zeros(16, 16, dtype=torch.uint8)
    bright[4:12, 6:10] = 255
    for name, pixels in (("bright", bright), ("ink", 255 - bright)):
        pillow.fromarray(pixels.numpy()).save(tmp_path / f"{name}.png")
    images = [read_image(str(tmp_path / f"{name}.png")) for name in ("bright", "ink")]
    assert torch.equal(*images) and images[0][0, 0, 0] == -1 and images[0][0, 4, 4] == 1


def test_images_that_cannot_be_read_are_named(tmp_path):
    pytest.importorskip("PIL.Image", reason="pillow is not installed").new("I;16", (8, 8)).save(tmp_path / "deep.png")
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "text.png").write_text("no image")
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    pack = struct.Struct(">I").pack
    data = [pack(len(body)) + kind + body + pack(zlib.crc32(kind + body)) for kind, body in chunks]
    (tmp_path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(data))
    for name, message in (
        ("deep", "must have 8 bits per channel; its mode is I;16"),
        ("fifo", "must be a regular file"),
        ("text", "not an image that can be read"),
        ("huge", r"not an image that can be read: Image size \(3600000000 pixels\)"),
    ):
        with pytest.raises(ValueError, match=rf"{name}\.png: .*{message}"):
            read_image(str(tmp_path / f"{name}.png"))
