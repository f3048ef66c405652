import hashlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from transformer_kernels import training
from transformer_kernels.training import (
    CharGPT,
    CharGPTConfig,
    Checkpoint,
    CheckpointError,
    Trainer,
    load_checkpoint,
    save_checkpoint,
)
from transformer_kernels.training.checkpoint import FILES, load_trained, load_weights


def checkpoint(step=1):
    return Checkpoint(
        weights={"weight": torch.full((3, 2), float(step)), "bias": torch.zeros(3)},
        optimizer={"0.exp_avg": torch.ones(3, 2)},
        config=CharGPTConfig(steps=7),
        tokenizer={"kind": "characters", "characters": "ab"},
        trainer={"step": step},
    )


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(tmp_path / "last", checkpoint())
    return tmp_path / "last"


def test_what_was_saved_is_loaded(folder):
    loaded = load_checkpoint(folder)
    assert torch.equal(loaded.weights["weight"], torch.ones(3, 2))
    assert torch.equal(loaded.optimizer["0.exp_avg"], torch.ones(3, 2))
    assert loaded.config == CharGPTConfig(steps=7)
    assert (loaded.tokenizer, loaded.trainer) == (checkpoint().tokenizer, {"step": 1})
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "manifest.json"])


def test_the_next_one_replaces_it_and_leaves_nothing_else(folder):
    save_checkpoint(folder, checkpoint(step=2))
    assert load_checkpoint(folder).trainer == {"step": 2}
    assert [path.name for path in folder.parent.iterdir()] == ["last"]


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_reported_with_both_sizes_or_hashes(folder, name):
    path = folder / name
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=rf"{path}: expected {len(data)} bytes, found {len(data) - 1}"):
        load_checkpoint(folder)
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{path}: expected SHA-256 \w{{64}}, found \w{{64}}"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_missing_file_is_reported(folder, name):
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda manifest: manifest.update(format=2), "expected format 1, found 2"),
        (lambda manifest: manifest["files"].update({"../../etc/passwd": {}}), "expected the files model.safetensors"),
        (lambda manifest: manifest["files"].pop("config.json"), "expected the files model.safetensors"),
        (lambda manifest: manifest["files"].update({"config.json": 1}), "expected bytes and sha256 of each file"),
        (lambda manifest: manifest.update(files=[]), "expected the files"),
    ],
)
def test_a_hostile_manifest_is_refused(folder, change, message):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("model.safetensors", b"\x80\x04pickled", "not a safetensors file"),
        ("model.safetensors", (2**62).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        ("config.json", b'{"recipe": "char-gpt", "exec": 1}', "unknown key 'exec'"),
        ("config.json", b'{"recipe": "os.system"}', "recipe must be one of char-gpt, gpt, imdb"),
        ("config.json", b"{}", "config.json does not describe a run"),
        ("trainer.json", b"[]", "expected an object, found a list"),
        ("tokenizer.json", b"{", "not JSON"),
    ],
)
def test_hostile_contents_with_a_correct_hash_are_refused(folder, name, content, message):
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_a_pickle_is_never_loaded(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"found a file; pickles .* are never loaded"):
        load_checkpoint(tmp_path / "model.pt")


def test_weights_of_another_model_are_listed():
    model = torch.nn.Linear(2, 4)
    weights = {"weight": torch.zeros(3, 2), "gain": torch.zeros(1)}
    with pytest.raises(CheckpointError) as error:
        load_weights(model, weights, "here")
    assert str(error.value) == (
        "here: the weights belong to another model or vocabulary: missing: bias; unexpected: gain; "
        "mismatched: weight (model (4, 2), checkpoint (3, 2))"
    )


@pytest.mark.parametrize("fatal_call", range(1, 9))
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(folder, fatal_call):
    """The child is killed at its n-th flush or rename: six files, two renames."""
    child = os.fork()
    if child == 0:
        calls = 0

        def deadly(function):
            def wrapped(*arguments):
                nonlocal calls
                calls += 1
                if calls == fatal_call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments)

            return wrapped

        os.fsync, os.rename = deadly(os.fsync), deadly(os.rename)
        save_checkpoint(folder, checkpoint(step=2))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert load_checkpoint(folder).trainer == {"step": 1}
    save_checkpoint(folder, checkpoint(step=3))
    assert load_checkpoint(folder).trainer == {"step": 3}
    assert [path.name for path in folder.parent.iterdir()] == ["last"]


def test_no_source_file_unpickles():
    for path in Path(training.__file__).parent.rglob("*.py"):
        assert not {"torch.load", "pickle.load"} & set(path.read_text().replace("(", " ").split()), path


def rewrite(folder, name, content):
    """Replace a file together with its entry in the manifest."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def run(char_config):
    """A checkpoint of a tiny run."""
    trainer = Trainer(CharGPT(char_config(steps=1, eval_every=9)))
    trainer.fit()
    return trainer.folder / "last"


def refused(folder, config):
    """What `load_trained` and `Trainer.restore` say."""
    messages = []
    for load in (load_trained, Trainer(CharGPT(config)).restore):
        with pytest.raises(CheckpointError) as caught:
            load(folder)
        messages.append(str(caught.value))
    assert all(str(folder) in message and "\n" not in message for message in messages)
    return messages


DEEP = b"[" * 100_000
STRANGE = (
    ("tokenizer.json", "kind", []),
    ("tokenizer.json", "kind", {"a": 1}),
    ("tokenizer.json", "characters", 3),
    ("config.json", "model", {"layers": 2**70, "width": 16, "heads": 2}),
    ("config.json", "model", {"layers": 1, "width": "wide", "heads": 2}),
    ("config.json", "context", -1),
    ("config.json", "recipe", []),
)


@pytest.mark.parametrize(("name", "field", "value"), STRANGE)
def test_strange_values_under_a_valid_hash(name, field, value, run, char_config):
    given = json.loads((run / name).read_text())
    rewrite(run, name, json.dumps(given | {field: value}).encode())
    with pytest.raises(CheckpointError, match=str(run)):
        load_trained(run)
    rewrite(run, name, DEEP)
    assert all("not JSON" in message for message in refused(run, char_config()))


@pytest.mark.parametrize("field", ["step", "sampler", "random", "evaluated_at", "validation", "data"])
@pytest.mark.parametrize("value", [None, [], "x", {"a": 1}], ids=str)
def test_a_strange_trainer_state_is_refused_by_restore(field, value, run, char_config):
    given = json.loads((run / "trainer.json").read_text())
    rewrite(run, "trainer.json", json.dumps(given | {field: value}).encode())
    try:
        Trainer(CharGPT(char_config())).restore(run)
    except CheckpointError as error:
        assert str(run) in str(error)
    else:
        assert field == "validation" and value in ([], {"a": 1})  # is only shown


CHANGES = {
    "a scalar": lambda tensor: torch.tensor(1.0),
    "integers": lambda tensor: torch.ones_like(tensor, dtype=torch.int32),
    "NaN": lambda tensor: torch.full_like(tensor, torch.nan),
    "another shape": lambda tensor: torch.zeros(300, 200),
    "nothing": lambda tensor: None,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_strange_tensors_under_a_valid_hash(name, change, run, char_config):
    tensors = load_file(run / name)
    first = next(each for each in sorted(tensors) if tensors[each].dim() == 2)
    changed = CHANGES[change](tensors.pop(first))
    rewrite(run, name, save(tensors | ({} if changed is None else {first: changed})))
    with pytest.raises(CheckpointError, match=str(run)) as caught:
        Trainer(CharGPT(char_config())).restore(run)
    assert first.partition(".")[0] in str(caught.value)
    if name == "model.safetensors":
        with pytest.raises(CheckpointError, match=first):
            load_trained(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": float("nan")}, "seconds must be finite and not negative; got nan"),
        ({"seconds": -1e9}, "seconds must be finite and not negative"),
        ({"step": -5}, "step must be a count; got -5"),
        ({"step": 2.7}, "step must be a count; got 2.7"),
        ({"evaluated_at": 10**40}, "evaluated_at must be a count"),
        ({"best_loss": "x"}, "best_loss must be a number; got 'x'"),
        ({"validation": {"foo": 1}}, "KeyError"),
        ({"validation": {"loss": "x", "accuracy": 1.0}}, "loss must be a number"),
        ({"sampler": {"epoch": 0, "batch": 10**9}}, "batch must be below"),
        ({"sampler": {"epoch": -7, "batch": 0}}, "epoch must be a count; got -7"),
    ],
    ids=str,
)
def test_numbers_that_no_run_reaches(change, message, run, char_config):
    given = json.loads((run / "trainer.json").read_text())
    rewrite(run, "trainer.json", json.dumps(given | change).encode())
    with pytest.raises(CheckpointError, match=message) as error:
        Trainer(CharGPT(char_config())).restore(run)
    assert str(run) in str(error.value)


def test_a_position_beyond_the_state_of_numpy(run, char_config):
    given = json.loads((run / "trainer.json").read_text())
    given["random"][0]["numpy"][1] = 10**6
    rewrite(run, "trainer.json", json.dumps(given).encode())
    with pytest.raises(CheckpointError, match="NumPy's position must be at most 624; got 1000000"):
        Trainer(CharGPT(char_config())).restore(run)


def test_a_strange_vocabulary_is_refused_by_restore(run, char_config):
    rewrite(run, "tokenizer.json", json.dumps({"kind": "characters", "characters": 5}).encode())
    with pytest.raises(CheckpointError, match="another vocabulary"):
        Trainer(CharGPT(char_config())).restore(run)
