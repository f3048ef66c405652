import hashlib

import pytest
import torch

from transformer_kernels.training import CharGPT, CharGPTConfig, DataFileError
from transformer_kernels.training.data import corpus
from transformer_kernels.training.data.corpus import Windows, read_corpus


def test_the_standard_library_is_the_same_text_every_time():
    text = read_corpus("stdlib")
    assert text == read_corpus("stdlib")
    assert 1_000_000 < len(text) <= 4_000_000
    assert set(text) <= {chr(code) for code in range(32, 127)} | {"\n"}
    assert "def " in text


def test_tinyshakespeare_comes_from_a_folder(data_folder):
    text = read_corpus("tinyshakespeare", str(data_folder))
    assert (len(text), len(set(text))) == (1_115_394, 65)
    assert text == read_corpus("tinyshakespeare", str(data_folder / "tinyshakespeare"))


def test_tinyshakespeare_is_bundled(data_folder):
    """The same characters as the public file, found without a network, a folder or a cache."""
    assert read_corpus("tinyshakespeare") == read_corpus("tinyshakespeare", str(data_folder))


def test_the_bundled_text_has_the_recorded_hash():
    text = read_corpus("tinyshakespeare")
    assert hashlib.sha256(text.encode()).hexdigest() == corpus.TINYSHAKESPEARE_SHA256
    assert CharGPT(CharGPTConfig(corpus="auto")).config.corpus == "tinyshakespeare"  # of earlier configs


def test_a_folder_without_tinyshakespeare_is_reported(tmp_path):
    with pytest.raises(DataFileError, match=r"no tinyshakespeare in .*: looked for .*input\.txt"):
        read_corpus("tinyshakespeare", str(tmp_path))


def test_any_text_file_works(tmp_path):
    (tmp_path / "text").write_bytes("\ufeffÄpfel\r\nund Birnen".encode())
    assert read_corpus(str(tmp_path / "text")) == "Äpfel\nund Birnen"


def test_bytes_that_are_no_text_are_reported(tmp_path):
    (tmp_path / "text").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="not UTF-8 text: invalid start byte at byte 3"):
        read_corpus(str(tmp_path / "text"))


def test_windows_are_the_text_and_what_follows():
    windows = Windows(torch.arange(20, dtype=torch.int32), 4, "text")
    inputs, targets = windows.batch(torch.tensor([0, 15]))
    assert inputs.tolist() == [[0, 1, 2, 3], [15, 16, 17, 18]]
    assert targets.tolist() == [[1, 2, 3, 4], [16, 17, 18, 19]]
    assert len(windows) == 16
    assert windows.spread(99).tolist() == [0, 4, 8, 12]
    assert windows.spread(2).tolist() == [0, 12]


def test_the_split_is_90_to_10(data_folder):
    recipe = CharGPT(CharGPTConfig(corpus="tinyshakespeare", data_dir=str(data_folder)))
    assert (len(recipe.training.tokens), len(recipe.validation.tokens)) == (1_003_854, 111_540)
