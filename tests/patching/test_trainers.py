"""Patched models in the hands of others: transformers' Trainer, PEFT's adapters, accelerate."""

from __future__ import annotations

import copy

import pytest
import torch

import transformer_kernels as tk
from tests.support import transformers_models as models
from tests.support.transformers_models import one_thread  # noqa: F401  # a fixture of every test here

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test`)")


def rows(family, count=8):
    """Single examples, padded and labelled."""
    batches = [models.inputs(family) for _ in range(-(-count // 3))]
    return [{name: value[row] for name, value in batch.items()} for batch in batches for row in range(3)][:count]


def trained(model, family, folder, **options):
    """The losses that transformers' Trainer logs, step by step."""
    pytest.importorskip("accelerate", reason="the package accelerate is not installed (extra `test`)")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        report_to=[], use_cpu=True, seed=0, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows(family))
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_the_trainer_gives_the_same_losses(family, tmp_path):
    """With its count of items over accumulated batches, which scales the loss."""
    eager = models.make(family)
    ours = copy.deepcopy(eager)
    assert tk.patch(ours).patched
    runs = [trained(model, family, tmp_path, gradient_accumulation_steps=2) for model in (eager, ours)]
    (_, expected), (trainer, given) = runs
    assert len(given) == 4 and given[-1] < given[0]
    torch.testing.assert_close(torch.tensor(given), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = type(eager).from_pretrained(tmp_path / "saved", attn_implementation="eager").train()
    batch = models.inputs(family)
    torch.testing.assert_close(loaded(**batch).loss, ours(**batch).loss, rtol=1e-4, atol=1e-5)


TARGETS = {"bert": ["query", "value", "dense"], "gpt2": ["c_attn", "c_proj", "c_fc"], "llama": ["q_proj", "gate_proj"]}


@pytest.mark.parametrize("first", ["patch", "adapters"])
@pytest.mark.parametrize("family", TARGETS)
def test_low_rank_adapters(family, first, tmp_path):
    peft = pytest.importorskip("peft", reason="the package peft is not installed (extra `test`)")
    settings = {"r": 2, "target_modules": TARGETS[family], "init_lora_weights": False, "lora_alpha": 8}
    wrapped = []
    for patched in (False, True):
        model = models.make(family)
        if patched and first == "patch":
            tk.patch(model)
        torch.manual_seed(1)
        wrapped.append(peft.get_peft_model(model, peft.LoraConfig(**settings, fan_in_fan_out=family == "gpt2")))
        if patched and first == "adapters":
            report = tk.patch(wrapped[-1])
            adapters = [name for name, each in wrapped[-1].named_modules() if hasattr(each, "base_layer")]
            assert [row.name for row in report.left if "an adapter" in row.reason] == adapters
    eager, ours = wrapped
    batch = models.inputs(family)
    expected, given = (models.run(family, model, batch) for model in (eager, ours))
    assert any("lora" in name for name in given)
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    ours.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(models.make(family), tmp_path).train()
    torch.testing.assert_close(again(**batch).loss, expected["loss"], rtol=1e-4, atol=1e-5)
    merged = ours.merge_and_unload()
    torch.testing.assert_close(merged(**batch).loss, expected["loss"], rtol=1e-4, atol=1e-5)
