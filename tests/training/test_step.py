import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import fresh
from transformer_kernels.training import CharGPT, Trainer, load_checkpoint
from transformer_kernels.training.step import IGNORED, Batch, autocast, choose_dtype, evaluation_totals, matrix_products


def batches():
    generator = torch.Generator().manual_seed(0)
    for size in (5, 5, 2):
        inputs = torch.randn(size, 3, generator=generator)
        yield Batch((inputs,), torch.randint(0, 4, (size,), generator=generator), size)


def test_batches_of_all_sizes_count_by_their_targets():
    model = nn.Linear(3, 4)
    totals = evaluation_totals(model, batches())
    logits = torch.cat([model(*batch.inputs) for batch in batches()])
    targets = torch.cat([batch.targets for batch in batches()])
    assert totals.loss == pytest.approx(F.cross_entropy(logits, targets, reduction="sum").item(), rel=1e-6)
    assert totals.correct == (logits.argmax(-1) == targets).sum().item()
    assert totals.targets == 12


@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])  # AVX2: by ATEN_CPU_CAPABILITY
@pytest.mark.parametrize("amx, avx512", [(False, False), (False, True), (True, False)])
def test_auto_is_bfloat16_where_the_processor_has_its_products(monkeypatch, amx, avx512, capability):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    expected = "bfloat16" if capability == "AVX512" and (amx or avx512) else "float32"
    assert choose_dtype("auto", torch.device("cpu")) == expected
    assert choose_dtype("auto", torch.device("meta")) == "float32"
    assert choose_dtype("tf32", torch.device("cpu")) == "tf32"


def test_a_run_stores_the_dtype_that_auto_selected(char_config, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    trainer = Trainer(CharGPT(char_config(dtype="auto")))
    trainer.fit()
    assert load_checkpoint(trainer.folder / "last").config.dtype == "float32"


def test_what_came_before_the_cancellation_counts():
    answers = iter([False, True])
    model = nn.Linear(3, 4).train()
    assert evaluation_totals(model, batches(), cancelled=lambda: next(answers)).targets == 5
    assert model.training


@pytest.mark.parametrize("mode", [True, False])
def test_dropout_is_off_in_evaluation_and_after_it_as_before(mode):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 4)).train(mode)
    expected = evaluation_totals(model[1], batches())
    assert evaluation_totals(model, batches()) == expected
    assert model.training is model[0].training is mode


def test_the_model_is_evaluated_in_the_dtype():
    found = []
    model = nn.Linear(3, 4)
    model.register_forward_hook(lambda module, inputs, output: found.append(output.dtype))
    for dtype in ("bfloat16", "float32"):
        evaluation_totals(model, list(batches())[:1], dtype)
    assert found == [torch.bfloat16, torch.float32]


def test_ignored_targets_count_neither_in_the_loss_nor_in_the_accuracy():
    model, (batch, *_) = nn.Linear(3, 4), batches()
    targets = torch.where(torch.tensor([True, False, True, False, False]), batch.targets, IGNORED)
    kept = Batch((batch.inputs[0][[0, 2]],), batch.targets[[0, 2]], 2)
    expected = evaluation_totals(model, [kept])
    nothing = batch._replace(targets=torch.full_like(targets, IGNORED))
    found = evaluation_totals(model, [batch._replace(targets=targets), nothing])
    assert found == pytest.approx(expected)
    assert found.targets == 2


def test_no_batch_is_no_total():
    assert evaluation_totals(nn.Linear(3, 4), []) == (0.0, 0.0, 0.0)


def test_tf32_is_set_while_entered_and_put_back():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(KeyError), matrix_products("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        raise KeyError
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has one setting")
def test_tf32_where_the_newer_setting_is_in_use():
    program = (
        "import torch; from transformer_kernels.training.step import matrix_products\n"
        "products = torch.backends.cuda.matmul; products.fp32_precision = 'ieee'\n"
        "with matrix_products('tf32'): print(products.fp32_precision)\n"
        "print(products.fp32_precision)"
    )
    assert fresh.checked(program).split() == ["tf32", "ieee"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_precisions_leave_matrix_products_alone(dtype):
    before = torch.get_float32_matmul_precision()
    with matrix_products(dtype):
        assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("dtype", ["float32", "tf32", "bfloat16", "float16"])
def test_autocast_is_for_the_half_precisions(dtype):
    x = torch.ones(2, 2)
    with autocast("cpu", dtype):
        assert (x @ x).dtype == (torch.float32 if dtype in ("float32", "tf32") else getattr(torch, dtype))


def test_a_tf32_run_steps_and_validates_in_tf32_and_restores(char_config):
    seen = []
    trainer = Trainer(CharGPT(char_config(dtype="tf32", steps=2, eval_every=2)))
    trainer.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    trainer.model.head_bias.register_hook(lambda grad: seen.append(torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    trainer.fit()
    assert set(seen) == {"high"} and len(seen) > 4
    assert torch.get_float32_matmul_precision() == before
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())


@pytest.mark.slow
def test_bfloat16_learns_as_float32_does(char_config):
    """The loss curves, in windows of 50 steps, differ by less than those of float32 runs with other seeds do."""

    def curve(**changes):
        trainer = Trainer(CharGPT(char_config(steps=300, lr=1e-2, **changes)))
        return torch.stack([trainer.step() for _ in range(300)]).view(6, 50).mean(1)

    exact = torch.stack([curve(seed=seed) for seed in range(4)])  # (seeds, windows)
    spread = exact.amax(0) - exact.amin(0)
    difference = (curve(seed=0, dtype="bfloat16") - exact[0]).abs()
    assert (difference < spread).all()
    assert spread.max() < 0.5
    assert difference.max() > 0
