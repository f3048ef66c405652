import dataclasses
import os

import pytest

from transformer_kernels.training import CharGPT, CharGPTConfig, ImdbConfig
from transformer_kernels.training.config import bundled_configs, read_config_file, resumed_config
from transformer_kernels.training.data.tokenizers import ByteTokenizer, CharacterTokenizer
from transformer_kernels.training.recipes import find_recipe, make_config
from transformer_kernels.training.recipes.translate import PairTokenizer, TranslateConfig

CHANGEABLE = {"accumulate", "out", "device", "backend", "threads", "compile", "cuda_graph", "deterministic"}
CHANGEABLE |= {"tensorboard", "progress"}
CHANGEABLE |= {"steps", "epochs", "time_limit", "lr", "schedule", "warmup_steps", "weight_decay", "beta2", "clip"}
CHANGEABLE |= {"log_every", "eval_every", "save_every", "patience"}
CHANGEABLE_OF = {
    "char-gpt": {"data_dir", "sample"},
    "gpt": {"data_dir", "sample", "vocab_dir"},
    "imdb": {"data", "test_data", "baseline", "vocab_dir"},
    "mlm": {"data", "vocab_dir"},
    "translate": {"data", "beam", "mbr", "length_penalty"},
    "vit": set(),
    "word2vec": {"data_dir"},
}
"""What a resumed run may change: nothing that determines the weights' shapes, the data or its order."""
LETTERS = CharacterTokenizer(map(chr, range(65)))


@pytest.mark.parametrize(
    "name, text",
    [
        ("run.yaml", "lr: 3e-4\nbatch-size: 8\ncompile: true\nmodel: {layers: 2}\n"),
        ("run.toml", "lr = 3e-4\nbatch_size = 8\ncompile = true\nmodel = {layers = 2}\n"),
        ("run.json", '{"lr": 3e-4, "batch_size": 8, "compile": true, "model": {"layers": 2}}'),
    ],
)
def test_a_file_means_the_same_in_every_format(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    config = make_config("imdb", read_config_file(tmp_path / name))
    assert (config.lr, config.batch_size, config.compile, config.model) == (3e-4, 8, True, {"layers": 2})


@pytest.mark.parametrize(
    "values, message",
    [
        ({"bacth_size": 3}, "config: unknown key 'bacth_size' for char-gpt; did you mean 'batch_size'?"),
        ({"recipe": "imdb"}, "config: written for the recipe 'imdb', not for 'char-gpt'"),
        ({"steps": 1.5}, "steps must be of type int; got 1.5"),
        ({"lr": "fast"}, "lr must be of type float; got 'fast'"),
        ({"compile": 1}, "compile must be of type bool; got 1"),
        ({"out": 3}, "out must be of type str; got 3"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"lr": float("nan")}, "lr must be finite and not negative; got nan"),
        ({"beta2": 1.0}, "beta2 must be in [0, 1); got 1.0"),
        ({"seed": -1}, "seed must be finite and not negative; got -1"),
        ({"dtype": "float8"}, "dtype must be one of auto, float32, tf32, bfloat16, float16; got 'float8'"),
        ({"steps": 3, "epochs": 2}, "steps and epochs exclude each other; got steps 3 and epochs 2"),
    ],
)
def test_bad_values_are_reported(values, message):
    with pytest.raises(ValueError) as error:
        make_config("char-gpt", values)
    assert str(error.value) == message


@pytest.mark.parametrize("value", [300, 300.0, "300", "300s", "5m", "0.5h"])
def test_a_time_limit_has_units(value):
    seconds = 1800 if value == "0.5h" else 300
    assert CharGPTConfig(time_limit=value).time_limit == seconds


@pytest.mark.parametrize("value", ["5 minutes", "m", "", "5d", None])
def test_a_time_limit_that_is_none_is_reported(value):
    with pytest.raises(ValueError, match=rf"^time_limit must be a duration such as 90, 5m or 1h; got {value!r}$"):
        CharGPTConfig(time_limit=value)


def test_review_options_are_checked():
    with pytest.raises(ValueError, match=r"validation must be in \[0, 1\); got 1.0"):
        ImdbConfig(validation=1)
    with pytest.raises(ValueError, match="at least 3; got 2"):
        ImdbConfig(max_length=2)
    with pytest.raises(ValueError, match="config: unknown key 'vocab_dir' for char-gpt; known: out, backend, "):
        make_config("char-gpt", {"vocab_dir": "x"})


@pytest.mark.parametrize("name, text", [("run.yaml", "- 1\n"), ("run.yaml", "a: [\n"), ("run.ini", "a=1")])
def test_a_file_that_is_no_table_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"run\."):
        read_config_file(tmp_path / name)


@pytest.mark.parametrize("name", bundled_configs())
def test_every_bundled_config_names_its_recipe_and_makes_a_model(name):
    values = read_config_file(name)
    assert name in bundled_configs(values["recipe"])
    config = make_config(values["recipe"], values, name)
    tokenizers = {"gpt": ByteTokenizer(), "translate": PairTokenizer(LETTERS, LETTERS)}
    tokenizer = tokenizers.get(values["recipe"], LETTERS)
    assert find_recipe(values["recipe"]).build(config, tokenizer).num_parameters() > 0


@pytest.mark.parametrize(
    ("name", "config"),
    [("notebook", CharGPTConfig), ("imdb_notebook", ImdbConfig), ("translate_notebook", TranslateConfig)],
)
def test_a_notebook_config_is_what_the_python_defaults_are(name, config):
    """`sweep` and `demo` use the defaults of `CharGPTConfig`."""
    assert make_config(config.recipe, read_config_file(name)) == config()


@pytest.mark.parametrize("recipe", ["char-gpt", "gpt", "imdb", "translate"])
def test_the_default_of_a_command_ends_after_ten_minutes(recipe):
    """The documents' configurations, with a number of steps or epochs, are named ones."""
    config = make_config(recipe, read_config_file(find_recipe(recipe).Config.default_config))
    assert config.recipe == recipe and 0 < config.time_limit <= 600


def test_the_default_of_the_command_has_the_size_that_it_promises():
    config = make_config("char-gpt", read_config_file(CharGPTConfig.default_config))
    assert CharGPT.build(config, LETTERS).num_parameters() == 1_784_192
    assert (config.time_limit, config.steps, config.context, config.batch_size) == (300.0, None, 256, 8)
    assert (config.optimizer, config.schedule, config.dtype) == ("muon", "linear", "auto")


def test_a_file_is_preferred_to_a_config_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imdb_small").write_text("lr: 1.0")
    with pytest.raises(ValueError, match="a config file ends in"):
        read_config_file("imdb_small")


def test_an_unknown_config_lists_the_bundled_ones():
    with pytest.raises(
        ValueError, match=r"imdb_large: no such config file; .* char_gpt_10m, char_gpt_cpu, five_minutes, gpt_small"
    ):
        read_config_file("imdb_large")


def test_an_empty_file_changes_nothing(tmp_path):
    (tmp_path / "run.yaml").write_text("")
    assert make_config("char-gpt", read_config_file(tmp_path / "run.yaml")) == CharGPTConfig()


def test_a_run_has_a_length_of_its_own():
    assert (CharGPTConfig().steps, CharGPTConfig().epochs) == (2000, None)
    assert (ImdbConfig().steps, ImdbConfig().epochs) == (None, 3)
    assert (CharGPTConfig(time_limit=9).steps, ImdbConfig(time_limit=9).epochs) == (None, None)
    assert (CharGPTConfig(epochs=1).steps, ImdbConfig(steps=9).epochs) == (None, None)


def test_resuming_may_change_the_length_but_not_what_exactness_needs():
    saved = CharGPTConfig(epochs=2)
    assert resumed_config(saved, {"steps": 9}).steps == 9
    timed = resumed_config(saved, {"time_limit": "5m"})
    assert (timed.epochs, timed.time_limit, timed.steps) == (None, 300.0, None)
    assert resumed_config(timed, {"steps": 9}).time_limit == 0.0
    with pytest.raises(ValueError, match="--resume: batch_size cannot change: 64 in the checkpoint, 32 requested"):
        resumed_config(saved, {"batch_size": 32})


@pytest.mark.parametrize("recipe", CHANGEABLE_OF)
def test_a_resumed_run_keeps_its_model_and_data(recipe):
    fields = dataclasses.fields(find_recipe(recipe).Config)
    assert {field.name for field in fields if not field.metadata["fixed"]} == CHANGEABLE | CHANGEABLE_OF[recipe]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"lr = = 3", "not valid TOML: Invalid value"),
        ("a.toml", b"\xff\xfe", "not UTF-8 text: invalid start byte at byte 0"),
        ("a.yaml", b"[" * 3000, "not valid YAML: maximum recursion depth"),
        ("a.yaml", b"lr: 2001-99-99", "not valid YAML: month must be in 1..12"),
        ("a.yaml", b"seed: " + b"9" * 5000, "not valid YAML: Exceeds the limit"),
        ("a.yaml", b"model:\n  layers: 1\n  layers: 2\n", "line 2: not valid YAML: layers is given twice"),
        ("a.json", b'{"lr": 1, "lr": 2}', "not JSON: 'lr' is given twice"),
        ("a.json", b'{"lr": NaN}', "not JSON: the number NaN"),
        ("a.json", b"[1]", "must contain an object; got list"),
    ],
)
def test_a_damaged_file_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_config_file(tmp_path / name)
    assert str(error.value).startswith(f"{tmp_path / name}") and message in str(error.value)


@pytest.mark.parametrize("name", ["a.yaml", "a.toml", "a.json"])
def test_a_fifo_is_no_config(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="must be a regular file"):
        read_config_file(tmp_path / name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": True}, "steps must be of type int; got True"),
        ({"lr": True}, "lr must be of type float; got True"),
        ({"seed": 2**64}, "seed must be an integer of 64 bits; got 18446744073709551616"),
        ({"threads": 10**6}, "threads must be at most 4,096; got 1000000"),
        ({"lr": 1e300}, r"lr must be at most 1e\+30; got 1e\+300"),
        ({"context": 0}, "context must be at least 1; got 0"),
        ({"out": "a\0b"}, r"out must be of type str; got 'a\\x00b'"),
    ],
)
def test_values_that_no_run_has(values, message):
    with pytest.raises(ValueError, match=message):
        make_config("char-gpt", values)


def test_a_vocabulary_that_no_memory_holds():
    with pytest.raises(ValueError, match="vocabulary must be at most 1,048,576"):
        ImdbConfig(vocabulary=10**18)
    with pytest.raises(ValueError, match="source_vocabulary must be at most 1,048,576"):
        TranslateConfig(source_vocabulary=10**18)
