"""Document 003, pretrained models: the sizes of GPT-2 and DistilGPT-2, and the ids of a text."""

import pytest
import torch

import python_ref
from transformer_kernels.training.data.tokenizers import Gpt2Tokenizer


@pytest.mark.parametrize(("layers", "parameters"), [(12, 124_439_808), (6, 81_912_576)], ids=["gpt2", "distilgpt2"])
def test_parameters(layers, parameters):
    with torch.device("meta"):
        model = python_ref.build("gpt2", layers=layers)
    assert model.num_parameters() == parameters


def test_tokens_of_a_text(data_folder):
    assert Gpt2Tokenizer(str(data_folder / "gpt2_bpe")).encode("The quick brown fox") == [464, 2068, 7586, 21831]
