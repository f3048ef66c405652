"""Document 003, pretrained models: how large GPT-2 and DistilGPT-2 are."""

import pytest
import torch

import python_ref


@pytest.mark.parametrize(("layers", "parameters"), [(12, 124_439_808), (6, 81_912_576)], ids=["gpt2", "distilgpt2"])
def test_parameters(layers, parameters):
    with torch.device("meta"):
        model = python_ref.build("gpt2", layers=layers)
    assert model.num_parameters() == parameters
