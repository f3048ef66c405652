import pytest
import torch
from torch import nn

from tests.training.loop.test_graphs import RecordedGraphs, assert_resuming_is_exact, outcomes
from transformer_kernels.training import Imdb, Processes, Trainer
from transformer_kernels.training.loop import optimisation
from transformer_kernels.training.loop.optimisation import SparseEmbeddingAdamW, make_optimizer

OPTIONS = {"lr": 0.1, "weight_decay": 0.5}


class Toy(nn.Module):
    """An embedding of 6 rows, as wide as a vector register, and a matrix."""

    def __init__(self):
        super().__init__()
        self.rows, self.matrix = nn.Embedding(6, 16), nn.Linear(16, 1)

    def step(self, optimizer, tokens):
        optimizer.zero_grad()
        self.matrix(self.rows(tokens)).square().sum().backward()
        optimizer.tokens = tokens
        optimizer.step()


def twins():
    """The same module with a sparse and with a usual optimizer."""
    torch.manual_seed(0)
    sparse, usual = Toy(), Toy()
    usual.load_state_dict(sparse.state_dict())
    optimizer = SparseEmbeddingAdamW(sparse.parameters(), sparse.rows.weight, **OPTIONS)
    return (sparse, optimizer), (usual, torch.optim.AdamW(usual.parameters(), **OPTIONS, fused=True))


def tensors(module, optimizer):
    states = [value for parameter in module.parameters() for value in optimizer.state[parameter].values()]
    return [value.clone() for value in (*module.state_dict().values(), *states)]


def test_with_all_rows_in_each_batch_it_is_adamw():
    pairs = twins()
    for _ in range(5):
        for module, optimizer in pairs:
            module.step(optimizer, torch.tensor([[0, 1, 2], [3, 4, 5]]))
    for got, expected in zip(*(tensors(*pair) for pair in pairs), strict=True):
        assert torch.equal(got, expected)


def test_absent_rows_and_their_moments_stay_and_present_ones_follow():
    (sparse, optimizer), (usual, adamw) = twins()
    before = sparse.rows.weight.detach().clone()
    for module, each in ((sparse, optimizer), (usual, adamw)):
        module.step(each, torch.tensor([[1, 4], [4, 1]]))
    present, absent = [1, 4], [0, 2, 3, 5]
    assert torch.equal(sparse.rows.weight.grad, usual.rows.weight.grad)
    assert torch.equal(sparse.rows.weight[present], usual.rows.weight[present])
    assert torch.equal(sparse.rows.weight[absent], before[absent])
    assert not torch.equal(usual.rows.weight[absent], before[absent])
    sparse.step(optimizer, torch.tensor([[0, 2]]))
    average = optimizer.state[sparse.rows.weight]["exp_avg"]
    assert torch.equal(average[present], adamw.state[usual.rows.weight]["exp_avg"][present])
    assert optimizer.state[sparse.rows.weight]["step"] == 2


def test_a_row_that_comes_twice_and_is_computed_twice_is_the_same(monkeypatch):
    results = []
    for repeated in (False, True):
        if repeated:
            monkeypatch.setattr(optimisation, "row_numbers", torch.flatten)
        (module, optimizer), _ = twins()
        for _ in range(3):
            module.step(optimizer, torch.tensor([[1, 4], [4, 4]]))
        results.append(tensors(module, optimizer))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def sparse_config(imdb_config, **changes):
    return imdb_config(sparse_embedding=True, steps=12, eval_every=6, **changes)


def test_clipping_counts_and_shrinks_the_rows(imdb_config):
    clip = 1e-3
    norms = []
    for changes in ({"sparse_embedding": True}, {}):
        trainer = Trainer(Imdb(imdb_config(clip=clip, **changes)))
        torch.manual_seed(1)
        norms.append(outcomes(trainer, 1)[0, 1].item())
        averages = [state["exp_avg"] for state in trainer.optimizer.state.values()]
        assert torch.nn.utils.get_total_norm(averages).item() == pytest.approx(0.1 * clip, rel=1e-3)
    assert norms[0] == norms[1] > clip


def test_another_optimizer_is_refused(imdb_config):
    with pytest.raises(ValueError, match="--sparse-embedding is an AdamW; it excludes --optimizer muon"):
        Trainer(Imdb(sparse_config(imdb_config, optimizer="muon")))


def test_it_learns(imdb_config):
    losses = outcomes(Trainer(Imdb(imdb_config(sparse_embedding=True, steps=60, lr=1e-2))), 60)[:, 0]
    assert losses[-10:].mean() < 0.5 * losses[:5].mean()


def test_a_step_of_float16_that_overflows_changes_no_row(imdb_config):
    trainer = Trainer(Imdb(sparse_config(imdb_config, dtype="float16")))
    trainer.scaler.scale(torch.ones(()))
    trainer.scaler._scale.fill_(torch.inf)
    before = trainer.model.embedding.tokens.weight.detach().clone()
    trainer.step()
    assert torch.equal(trainer.model.embedding.tokens.weight, before)
    assert trainer.optimizer.state[trainer.model.embedding.tokens.weight]["step"] == 0


def test_graphs_change_no_bit(imdb_config):
    config = sparse_config(imdb_config, padding="max")
    results = []
    for graphs in (None, RecordedGraphs()):
        trainer = Trainer(Imdb(config), graphs=graphs)
        torch.manual_seed(1)
        results.append(outcomes(trainer, 12))
    assert graphs.replays == 9
    assert torch.equal(*results)


def test_resuming_is_exact(imdb_config, tmp_path):
    whole, half = (sparse_config(imdb_config, out=str(tmp_path / name)) for name in ("whole", "half"))
    assert_resuming_is_exact(*(lambda c=config: Trainer(Imdb(c)) for config in (whole, half, half)))


def test_where_it_is_impossible_is_reported(imdb_config):
    config = sparse_config(imdb_config)
    model = Imdb(config).build_model()
    with pytest.raises(ValueError, match="requires a single process: the rows of a batch are not exchanged"):
        make_optimizer(model, config, torch.device("cpu"), Processes(count=2))
    with pytest.raises(ValueError, match="requires the fused AdamW of a CPU or CUDA device; got meta"):
        make_optimizer(model.to("meta"), config, torch.device("meta"), Processes())


@pytest.mark.gpu
def test_a_gpu_does_as_a_cpu_does():
    results = []
    for device in ("cpu", "cuda"):
        (module, _), _ = twins()
        module = module.to(device)
        optimizer = SparseEmbeddingAdamW(module.parameters(), module.rows.weight, **OPTIONS)
        for tokens in ([[1, 4], [4, 4]], [[0, 1], [1, 1]]):
            module.step(optimizer, torch.tensor(tokens, device=device))
        results.append([tensor.cpu() for tensor in tensors(module, optimizer)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
