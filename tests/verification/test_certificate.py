"""certify: samples of a run against float64; faults of single operations, of memory and of NaN, which it locates.

Faults of training runs are in tests/gates/test_planted_faults.py.
"""

import copy
import json
import math

import pytest
import torch

import transformer_kernels as tk
from tests.support.parity import require
from tests.support.plants import altered, flip, kernel
from transformer_kernels.backends import dispatch
from transformer_kernels.verification import certificate as certificates
from transformer_kernels.verification.examples import EXAMPLES
from transformer_kernels.verification.nonfinite import first_non_finite

FAST = ("torch", "cpu")


class Call(torch.nn.Module):
    """One operation with its example, as a layer."""

    def __init__(self, op, backend):
        super().__init__()
        self.op, self.options = op, {**EXAMPLES[op].options, "backend": backend}

    def forward(self, tensors):
        return getattr(tk, self.op)(**tensors, **self.options)


def passes(op, backend, dtype=torch.float32, rows=24, columns=64):
    """A forward and a backward pass of the example within a model whose layer is called inner.1."""
    model = torch.nn.ModuleDict({"inner": torch.nn.Sequential(torch.nn.Identity(), Call(op, backend))})
    model.forward = lambda tensors: model["inner"](tensors)
    tensors = EXAMPLES[op].make(rows, columns, dtype)
    torch.manual_seed(0)
    outputs = model(tensors)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    torch.autograd.backward(outputs, [torch.randn(output.shape).to(output.dtype) for output in outputs])
    return {name: value.grad for name, value in tensors.items() if value.is_floating_point()}


# No false alarm


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", sorted(EXAMPLES))
def test_right_kernels_are_within_the_budget(op, dtype, backend, device):
    require(op, backend, device, dtype)
    with tk.certify(share=1.0) as certificate:
        passes(op, backend, dtype)
    assert certificate.beyond == 0 and certificate.non_finite is None, str(certificate)
    assert not certificate.unchecked and 0.0 < certificate.largest_share < 1.0
    seen = {name.partition(" ")[2] for name in certificate.operations}
    assert seen == {"forward", "backward"}
    assert set(certificate.layers) == {"inner.1"}


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("op", sorted(EXAMPLES))
def test_parts_of_calls(op, backend, device, monkeypatch):
    """Rows of a call, and a linear layer's columns, are within the budget as the whole is."""
    require(op, backend, device, torch.float32)
    monkeypatch.setattr(certificates, "WHOLE", 10**9)
    monkeypatch.setattr(certificates, "SMALL", 0)
    monkeypatch.setattr(certificates.Certificate, "_is_due", lambda *_: True)
    with tk.certify() as certificate:
        for _ in range(4):
            passes(op, backend, rows=64)
    assert certificate.beyond == 0 and not certificate.unchecked, str(certificate)


@pytest.mark.parametrize("named", ["x", "weight"])
def test_parts_of_a_linear_layer_see_its_gradients(named, device, monkeypatch):
    """Rows see the gradient of x, columns those of weight and bias; a wrong one is found although neither is whole."""
    require("linear", "cpu", device, torch.float32)
    monkeypatch.setattr(certificates, "SMALL", 0)
    monkeypatch.setattr(certificates.Certificate, "_is_due", lambda *_: True)

    kernel("linear", "backward", altered(scaled, 0 if named == "x" else 1))(None, monkeypatch)
    with tk.certify() as certificate:
        for _ in range(8):
            passes("linear", "cpu", rows=64)
    assert {finding.what for finding in certificate.findings} == {f"gradient of {named}"}


def test_a_part_beyond_its_budget_is_confirmed_by_the_whole(monkeypatch):
    """Errors of small rows may exceed what their own size allows, and are within the budget of the tensor."""
    monkeypatch.setattr(certificates, "SMALL", 0)
    monkeypatch.setattr(certificates, "WHOLE", 10**9)
    monkeypatch.setattr(certificates.Certificate, "_is_due", lambda *_: True)
    checked, check = [], certificates.check

    def of_parts(observed):
        checked.append(observed.call.x.shape[0])
        found = check(observed)
        return found if checked[-1] == 64 else [each._replace(share=2.0) for each in found]

    monkeypatch.setattr(certificates, "check", of_parts)
    with tk.certify() as certificate:
        passes("rms_norm", "torch", rows=64)
    assert checked == [4, 64, 4, 64] or checked == [4, 64, 64], checked
    assert certificate.beyond == 0 and 0.0 < certificate.largest_share < 1.0


def training(recorded, dtype=torch.float32):
    torch.manual_seed(0)
    model = tk.build("char_gpt", layers=2, width=32, heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(tokens, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = model.loss(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    tokens = torch.randint(65, (8, 33))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return model, tk.graphed(step, optimizer) if recorded else step, batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_run_has_the_same_bits_and_a_certificate(recorded, dtype, device, tmp_path):
    """Eager or recorded: every call of each step is seen, dropout's random numbers included."""
    require("attention", "cpu", device, torch.float32)
    with tk.use_backend("cpu"):
        _, plain, batch = training(recorded, dtype)
        expected = [plain(*batch) for _ in range(7)]
        model, step, batch = training(recorded, dtype)
        with tk.certify(tmp_path / "certificate.json", share=1.0) as certificate:
            certificate.name(model)
            losses = [step(*batch) for _ in range(7)]
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert certificate.beyond == 0 and not certificate.unchecked, str(certificate)
    assert certificate.operations["packed_attention forward"].calls == 2 * 7 - (2 if recorded else 0)  # the capture's
    assert {"blocks.0.attention", "blocks.1.feed_forward"} <= set(certificate.layers)
    written = json.loads((tmp_path / "certificate.json").read_text())
    assert written["samples"] == certificate.samples and written["line"] == certificate.line()
    assert written["processor"] and written["versions"]["torch"] == torch.__version__ and written["seconds"] > 0.0


def test_outside_nothing_is_observed():
    with tk.certify() as certificate:
        passes("layer_norm", "torch")
    before = certificate.samples
    assert dispatch.observer is None and before > 0
    passes("layer_norm", "torch")
    assert certificate.samples == before
    plans = dispatch.OPERATIONS["layer_norm"].plans.values()
    assert not any(isinstance(getattr(plan, "kernels", None), certificates.Watched) for plan in plans)


def test_checks_take_their_share_of_the_time(monkeypatch):
    """With a clock on which a check takes 50 ms and a call 1 ms, checks are at most 3 % after the first ones."""
    now = 0.0

    def check(observed):
        nonlocal now
        now += 0.05
        return []

    monkeypatch.setattr(certificates, "check", check)
    monkeypatch.setattr(certificates.time, "perf_counter", lambda: now)
    x, weight = torch.randn(4, 8), torch.ones(8)
    with tk.certify() as certificate:
        certificate.operations["rms_norm forward"] = certificates.Tally(samples=1)
        for _ in range(20_000):
            tk.rms_norm(x, weight, backend="torch")
            now += 0.001
    assert 0.013 < certificate.checking / certificate.seconds < 0.022


def test_a_run_too_short_for_checks_names_what_has_no_sample(monkeypatch):
    """A check that is expected to take longer than its share waits, and is made as soon as there was time for it."""
    now = 0.0
    monkeypatch.setattr(certificates.time, "perf_counter", lambda: now)
    monkeypatch.setattr(certificates, "GRACE", 0.0)
    x, weight = torch.randn(4, 8), torch.ones(8)
    with tk.certify() as certificate:
        tk.rms_norm(x, weight, backend="torch")
        now += 0.5
        tk.rms_norm(x, weight, backend="torch")
    assert certificate.samples == 0 and certificate.without_sample == ["rms_norm forward"]
    assert "1 of 1 passes without a sample" in certificate.line()
    assert "no sample, for lack of time: rms_norm forward" in str(certificate)
    with tk.certify() as certificate:
        tk.rms_norm(x, weight, backend="torch")
        now += 2.0
        tk.rms_norm(x, weight, backend="torch")
    assert certificate.samples == 2 and not certificate.without_sample  # y and rstd


def test_invalid_use():
    with pytest.raises(ValueError, match=r"certify: share must be in \(0, 1\]; got 0"), tk.certify(share=0):
        pass
    with tk.certify(), pytest.raises(RuntimeError, match="a certificate is being made already"), tk.certify():
        pass


def test_a_gradient_of_zero_is_rounding(device):
    """That of softmax for equal incoming gradients is the difference of its terms."""
    require("attention_weights", "cpu", device, torch.float32)
    tensors = EXAMPLES["attention_weights"].make(24, 64)
    with tk.certify(share=1.0) as certificate:
        tk.attention_weights(**tensors, backend="cpu").sum().backward()
    assert certificate.beyond == 0 and certificate.operations["attention_weights backward"].samples == 2


# Planted faults


def largest(alter):
    """Of the results of a kernel the first output or the largest gradient is changed in place."""

    def change(compute, *arguments):
        results = compute(*arguments)
        tensors = [results] if isinstance(results, torch.Tensor) else [x for x in results if x is not None]
        alter(tensors[0] if len(arguments) == 1 else max(tensors, key=lambda x: float(x.abs().max())))
        return results

    return change


def scaled(x):
    x.mul_(1.01)


def zeroed_row(x):
    """The row of the largest element; the first row of a gradient of causal attention is 0."""
    *row, _ = torch.unravel_index(x.abs().argmax(), x.shape or (1,))
    x[tuple(map(int, row))].zero_()


def one_element(x):
    index = int(x.abs().argmax())
    x[tuple(int(i) for i in torch.unravel_index(torch.tensor(index), x.shape))].mul_(1.02)


def flipped_bit(x):
    """The highest bit of the mantissa of the last nonzero element of the largest row."""
    flat = x.detach().view(torch.int32)
    index = tuple(int(i) for i in torch.unravel_index(x.abs().argmax(), x.shape))
    flat[index] ^= 1 << 22


ALTERATIONS = (scaled, zeroed_row, one_element, flipped_bit)
WRONG_KERNELS = [
    (op, direction, ALTERATIONS[(i + 2 * j) % len(ALTERATIONS)])
    for i, op in enumerate(sorted(EXAMPLES))
    for j, direction in enumerate(("forward", "backward"))
]


def plant(monkeypatch, op, direction, alter):
    kernel(op, direction, largest(alter))(None, monkeypatch)


@pytest.mark.parametrize(("op", "direction", "alter"), WRONG_KERNELS, ids=lambda x: getattr(x, "__name__", x))
def test_a_wrong_kernel_is_located(op, direction, alter, device, monkeypatch, tmp_path):
    """36 faults: every operation, forward and backward; with the default share, since first calls are checked."""
    require(op, "cpu", device, torch.float32)
    plant(monkeypatch, op, direction, alter)
    with tk.certify(tmp_path / "certificate.json") as certificate:
        passes(op, "cpu")
    assert certificate.beyond >= 1, str(certificate)
    finding = certificate.findings[0]
    assert (finding.operation, finding.direction, finding.layer) == (op, direction, "inner.1")
    assert finding.share > 1.0 and f"--sample {finding.file}" in str(certificate)


SCALED = [("cross_entropy", 1.0005), ("linear", 1.0005), ("layer_norm", 1.0005), ("attention", 1.0005)]


@pytest.mark.parametrize(("op", "factor"), SCALED)
def test_scaled_gradients_are_located(op, factor, device, monkeypatch):
    """4 faults of half a thousandth."""
    require(op, "cpu", device, torch.float32)
    plant(monkeypatch, op, "backward", lambda x: x.mul_(factor))
    with tk.certify() as certificate:
        passes(op, "cpu")
    assert certificate.findings[0].operation == op and certificate.findings[0].direction == "backward"


@pytest.mark.parametrize("bit", [0, 12, 22, 30])
def test_a_flipped_bit_in_a_weight_is_located(bit, device):
    """4 faults: a bit of a weight changes between forward and backward without an operator."""
    require("linear", "cpu", device, torch.float32)
    torch.manual_seed(0)
    model = torch.nn.Sequential(tk.nn.LayerNorm(64, backend="cpu"), tk.nn.LayerNorm(64, backend="cpu"))
    with tk.certify(share=1.0) as certificate:
        loss = model(torch.randn(8, 64)).sum()
        flip(model[1].weight, bit)
        loss.backward()
    changed = [finding for finding in certificate.findings if "changed in memory" in finding.what]
    assert [(finding.operation, finding.layer) for finding in changed] == [("layer_norm", "1")]


@pytest.mark.parametrize(("op", "field"), [("linear", "x"), ("attention", "q"), ("layer_norm", "x")])
def test_a_flipped_bit_in_a_saved_activation_is_located(op, field, device, monkeypatch):
    """After a forward pass that was checked, in a backward pass whose own check is not due."""
    require(op, "cpu", device, torch.float32)
    monkeypatch.setattr(certificates.Certificate, "_is_due", lambda self, tally, now: is_forward(self, tally))

    def is_forward(certificate, tally):
        return tally is certificate.operations.get(f"{op} forward")

    kept, see = [], certificates.Certificate.see
    monkeypatch.setattr(
        certificates.Certificate,
        "see",
        lambda self, observed, backend: (kept.append(dict(observed.kept())), see(self, observed, backend))[1],
    )
    tensors = EXAMPLES[op].make(24, 64)
    with tk.certify() as certificate:
        outputs = Call(op, "cpu")(tensors)
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        flip(kept[0][field], 22)
        output.sum().backward()
    assert [finding.what for finding in certificate.findings] == [f"{field} changed in memory after forward"]
    assert (certificate.findings[0].operation, certificate.findings[0].direction) == (op, "backward")


def test_copies_in_place_of_saved_tensors_are_no_change(device):
    """Hooks may put a copy at the address of another tensor."""
    require("linear", "cpu", device, torch.float32)
    with tk.certify(share=1.0) as certificate, torch.autograd.graph.save_on_cpu():
        for _ in range(3):
            passes("linear", "cpu")
    assert certificate.beyond == 0, str(certificate)


def test_an_optimizer_that_writes_by_address_is_no_fault(device):
    """After a forward pass whose backward pass was not checked."""
    require("layer_norm", "cpu", device, torch.float32)
    torch.manual_seed(0)
    model = tk.nn.LayerNorm(64, backend="cpu")
    with tk.certify(share=1.0) as certificate:
        for checked in (False, True):
            loss = model(torch.randn(8, 64)).sum()
            certificate._is_due = lambda *_, checked=checked: checked
            loss.backward()
            model.weight.detach().numpy()[:] *= 0.5  # past PyTorch's count of writes
            certificate._is_due = lambda tally, now: tally is certificate.operations["layer_norm backward"]
    assert certificate.beyond == 0, str(certificate)


@pytest.mark.parametrize("share", [1.0, 0.99])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("state", ["", "exp_avg"])
def test_a_flipped_bit_between_two_steps_is_located(state, recorded, share, device, monkeypatch):
    """In a weight or in an optimizer's state; with a share below 1 if the parameter is drawn."""
    require("attention", "cpu", device, torch.float32)
    with tk.use_backend("cpu"):
        model, step, batch = training(recorded)
        weight = model.blocks[0].feed_forward.up.weight
        optimizers = []
        with tk.certify(share=share) as certificate:
            certificate.name(model)
            monkeypatch.setattr(certificate._between._random, "choice", lambda _: weight)
            after = certificate._between._after
            certificate._between._after = lambda optimizer: (optimizers.append(optimizer), after(optimizer))
            for _ in range(5):
                step(*batch)
            assert not any("between" in finding.what for finding in certificate.findings), str(certificate)
            flip(optimizers[-1].state[weight][state] if state else weight, 22)
            step(*batch)
    finding = certificate.findings[-1]
    assert (finding.operation, finding.direction, finding.layer) == ("AdamW", "step", "blocks.0.feed_forward.up")
    name = f"{state} of weight" if state else "weight"
    assert finding.what == f"{name} changed in memory between two steps" and finding.what in str(certificate)
    assert sum("between" in finding.what for finding in certificate.findings) == 1


def test_writes_between_two_steps_are_no_fault():
    """Through an operator, .data or load_state_dict, and with an optimizer that has no state."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(optimizer):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()

    writes = [
        lambda: torch.nn.init.normal_(model.weight),
        lambda: model.weight.data.clamp_(-0.1, 0.1),
        lambda: model.weight.data.mul_(2.0),  # one bit of many elements, whose sum changes by one bit
        lambda: setattr(model.weight, "data", torch.randn(8, 8)),
        lambda: model.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()}),
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
    ]

    def clamp_one_element():
        largest = model.weight.data.max().view(torch.int32)
        model.weight.data.clamp_(max=float((largest & (largest - 1)).view(torch.float32)))  # its lowest bit is cleared

    writes.insert(0, clamp_one_element)  # while all weights differ
    with tk.certify(share=1.0) as certificate:
        for write in writes:
            step(optimizer)
            step(plain)
            write()
            step(plain)
            step(optimizer)
    assert certificate.beyond == 0, str(certificate)


@pytest.mark.parametrize("recorded", [False, True])
def test_seeds_and_gradients_that_the_program_sets_are_no_fault(recorded, device):
    """The same random numbers in each step; gradients that are scaled between the backward pass and the step."""
    require("attention", "cpu", device, torch.float32)
    with tk.use_backend("cpu"):
        torch.manual_seed(0)
        model = tk.build("char_gpt", layers=1, width=32, heads=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        tokens = torch.randint(65, (4, 17))

        def step(tokens, targets):
            model.loss(tokens, targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for parameter in model.parameters():
                parameter.grad.data.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()

        step = tk.graphed(step, optimizer) if recorded else step
        with tk.certify(share=1.0) as certificate:
            for _ in range(7):
                torch.manual_seed(1)
                step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    assert certificate.beyond == 0 and not certificate.unchecked, str(certificate)


def test_a_nan_in_compiled_code_names_its_module():
    """Forward and backward, in a model that was compiled and has run before; a name without torch.compile's prefix."""
    bad = {"forward": lambda x: (x - 2.0).log(), "backward": lambda x: (x - x.detach()).abs().sqrt()}
    for direction, function in bad.items():
        torch._dynamo.reset()
        model = Step(function)
        compiled = torch.compile(model, backend="aot_eager")

        def step(compiled=compiled):
            compiled(torch.ones(4, 8).cumsum(0)).sum().backward()

        with tk.certify() as certificate:
            for _ in range(2):
                step()
            found = certificate.find_non_finite(step)
        assert (found.layer, found.direction) == ("end", direction), found


class Step(torch.nn.Module):
    """A model with one function at its end."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.end = torch.nn.LayerNorm(8), End(function)

    def forward(self, x):
        return self.end(self.norm(x))


class End(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def nan_kernel(x):
    y = tk.gelu(x, backend="torch")
    return y / torch.where(torch.arange(4)[:, None] == 2, 0.0, 1.0)


def all_masked(x):
    return torch.softmax(x.masked_fill(torch.ones_like(x) > 0, -math.inf), -1)


def infinities(x):
    large = x.masked_fill(x > 0, math.inf)
    return large - large


SOURCES = {
    "log": (lambda x: (x - x).log(), "aten::log", "forward", True, (0,)),
    "overflow": (lambda x: (x * 200.0).exp(), "aten::exp", "forward", True, None),
    "quotient": (nan_kernel, "aten::div", "forward", True, (2,)),
    "masked": (all_masked, "softmax", "forward", False, (0,)),
    "difference": (infinities, "aten::sub", "forward", False, None),
    "half": (lambda x: (x.half() * 1e4 * 1e4).float(), "aten::mul", "forward", True, None),
    "root": (lambda x: (x - x.detach()).abs().sqrt(), "aten::", "backward", True, (0,)),
    "attention": (
        lambda x: tk.attention(*[x[None, None] * 1e30] * 3, backend="torch"), "attention", "forward", True, None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_the_first_non_finite_value_is_located(name):
    """8 sources of NaN and of overflow, of PyTorch's operators and of ours; a mask's -inf is none."""
    function, operator, direction, finite, row = SOURCES[name]
    model, x = Step(function), torch.randn(4, 8)
    found = first_non_finite(lambda: model(x).sum().backward())
    assert operator in found.operator and found.direction == direction, found
    assert found.layer == "end" and found.inputs_finite is finite and row in (None, found.row), found


def test_finite_steps_have_none():
    """A causal mask of -inf is not a source."""
    mask = torch.full((8, 8), -math.inf).triu(1)
    model = Step(lambda x: torch.softmax(x @ x.T + mask, -1))
    assert first_non_finite(lambda: model(torch.randn(8, 8)).sum().backward()) is None


def test_a_nan_that_was_given_is_named_as_such():
    """2 faults: in the batch and in a weight."""
    model, x = Step(lambda x: x * 2.0), torch.randn(4, 8)
    x[3, 1] = math.nan
    found = first_non_finite(lambda: model(x))
    assert (found.layer, found.inputs_finite, found.row) == ("norm", False, (3,))
    model.norm.weight.data[2] = math.nan
    assert not first_non_finite(lambda: model(torch.randn(4, 8))).inputs_finite


# What is written and replayed


def test_a_sample_is_replayed(device, monkeypatch, tmp_path, capsys):
    """The stored gradient is wrong, computed again it is right: the fault was not the kernel's."""
    from transformer_kernels import cli

    require("layer_norm", "cpu", device, torch.float32)
    with monkeypatch.context() as patched:
        plant(patched, "layer_norm", "backward", scaled)
        with tk.certify(tmp_path / "certificate.json") as certificate:
            passes("layer_norm", "cpu")
    file = certificate.findings[0].file
    assert file == str(tmp_path / "certificate-0.pt")
    assert cli.main(["verify-device", "--sample", file]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("gradient of x, as stored" in line for line in lines)
    again = [float(line.partition(": ")[2].split()[0]) for line in lines if "computed again" in line]
    assert len(again) == 3 and max(again) < 1.0


@pytest.mark.parametrize("op", sorted(EXAMPLES))
def test_samples_of_every_operation_are_replayed(op, device, monkeypatch, tmp_path, capsys):
    """Forward and backward, with what backward keeps of the call."""
    require(op, "cpu", device, torch.float32)
    monkeypatch.setattr(certificates.Certificate, "_compare_memory", lambda *_: [
        certificates.Checked("", certificates.NO_ERRORS, math.inf)
    ])  # fmt: skip
    with tk.certify(tmp_path / "certificate.json") as certificate:
        passes(op, "cpu")
    assert len(certificate.findings) >= 2
    for finding in certificate.findings:
        assert certificates.replay(finding.file), capsys.readouterr().out


def test_a_loss_that_is_not_finite_is_seen_without_a_sample(device):
    """Each loss is looked at, and the step that gave it can be run again."""
    require("cross_entropy", "cpu", device, torch.float32)
    model, x, targets = Step(lambda x: (x - x).log()), torch.randn(4, 8), torch.arange(4)

    def step():
        tk.cross_entropy(model(x), targets, backend="cpu")

    with tk.certify() as certificate:
        certificate.operations = {f"cross_entropy {each}": certificates.Tally(0, 1) for each in ("forward", "backward")}
        step()
        assert certificate.non_finite.operator == "transformer_kernels::cross_entropy"
        assert not certificate.non_finite.inputs_finite
        found = certificate.find_non_finite(step)
    assert found.operator == "aten::log" and found.layer == "end" and found is certificate.non_finite
    assert "not finite: aten::log in end, forward, row (0,); its inputs are finite" in str(certificate)


def test_copies_of_a_model_do_not_hold_the_certificate():
    model = torch.nn.Sequential(tk.nn.LayerNorm(8))
    with tk.certify():
        model(torch.randn(2, 8))
        copy.deepcopy(model)


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    with pytest.raises(ValueError, match="is a folder; pass the name of a file"), tk.certify(tmp_path):
        raise AssertionError("the run has begun")


@pytest.mark.parametrize(
    "sample",
    [
        b"text",
        [1],
        {"operation": "no such"},
        {"operation": "softmax", "backend": "cpu", "call": [1, 2], "result": [torch.zeros(2)], "grads": None},
    ],
    ids=["bytes", "list", "operation", "call"],
)
def test_what_is_no_sample_is_named(sample, tmp_path):
    path = tmp_path / "sample.pt"
    path.write_bytes(sample) if isinstance(sample, bytes) else torch.save(sample, path)
    with pytest.raises(ValueError, match=r"sample\.pt: not the sample of a certificate"):
        certificates.replay(str(path))


@pytest.mark.parametrize("classes", [2, 65])
def test_losses_of_a_confident_model_are_within_the_budget(classes):
    """The rounding errors of rows cancel in their mean, for some inputs in PyTorch's alone."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randint(classes, (64,), generator=generator)
        logits = torch.randn(64, classes, generator=generator) / 2
        logits[torch.arange(64), targets] += 14.0
        with tk.certify(share=1.0) as certificate:
            tk.cross_entropy(logits.requires_grad_(), targets).backward()
        assert certificate.beyond == 0, certificate
