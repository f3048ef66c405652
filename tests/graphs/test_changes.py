"""Changes after a recording: the next calls equal the plain call, or raise; no replay is stale."""

import copy
import functools
import types
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import transformer_kernels as tk
from transformer_kernels.backends import cpu

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built"
)

GAIN = torch.tensor(1.5)
FACTOR = 0.75
SETTINGS = types.SimpleNamespace(gain=3.0)
MODULE = types.ModuleType("module")
MODULE.offset = 0.25


def helper(x, *, shift=0.0):
    return F.hardtanh(x, -99.0, 99.0) * FACTOR + MODULE.offset + helper.extra + shift


helper.extra = 0.5


class Shape:
    """A plain object with a class attribute, an instance attribute and a method."""

    power = 2

    def __init__(self):
        self.gain = 3.0

    def apply(self, x):
        return x * self.gain + self.power


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.5)
        self.activation, self.scale, self.shift = F.gelu, 2.0, torch.ones(8)
        self.options, self.shape = {"gain": 1.25, "more": [1.0, 2.0]}, Shape()
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x):
        y = self.activation(self.linear(self.norm(x))) * self.scale + self.shift
        y = self.shape.apply(y) * self.options["gain"] + self.options["more"][1]
        return x + helper(self.dropout(y) * self.mask * GAIN)


class Subclass(Block):
    def forward(self, x):
        return super().forward(x) + 1


class World:
    """A model in the closure of a function, with the state that may change."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), Block()).eval()
        self.scale = 1.0
        self.shape = Shape()
        self.parts = [self.model, {"shape": Shape()}]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.context = nullcontext

    def ask(self, x, factor=1.0):
        with self.context():
            return self.shape.apply(self.model(x)) * self.scale + self.parts[1]["shape"].gain + factor

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def state_of(model):
    return {name: torch.randn_like(value) for name, value in model.state_dict().items()}


def assigned(owner, name, value):
    return lambda world: setattr(functools.reduce(_part, filter(None, owner.split(".")), world), name, value())


def _part(owner, name):
    return owner[int(name)] if name.isdigit() else getattr(owner, name)


def frozen(world):
    world.model[0].requires_grad_(False)


def swapped(world):
    first, second = world.model[0], world.model[1]
    world.model[0], world.model[1] = second, first
    second.scale = 3.0


def transposed(world):
    world.model[0].linear.weight.data = world.model[0].linear.weight.data.t()


def narrowed(world):
    world.model[1].shift.copy_(torch.arange(8.0))
    world.model[1].shift.data = world.model[1].shift.data[:1]


def reclassed(world):
    world.model[0].__class__ = Subclass


def converted(dtype):
    return lambda world: world.model.to(dtype)


def globals_set(name, value):
    def change(world, monkeypatch):
        monkeypatch.setitem(globals(), name, value)

    return change


def patched(owner, name, value):
    def change(world, monkeypatch):
        monkeypatch.setattr(owner, name, value)

    return change


def hook_of_all_modules(world, monkeypatch):
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, result: result * 2)
    world.cleanup = handle.remove


def parametrized(world):
    nn.utils.parametrizations.weight_norm(world.model[0].linear)


def backend(world):
    world.cleanup = lambda: tk.set_backend(None)
    tk.set_backend("torch")


def default_dtype(world):
    world.cleanup = lambda: torch.set_default_dtype(torch.float32)
    torch.set_default_dtype(torch.float64)


def in_place(world):
    with torch.no_grad():
        for each in (*world.model.parameters(), *world.model.buffers()):
            each.normal_()


ASKED = {
    "mode": lambda world: world.model.train(),
    "mode of a layer": lambda world: world.model[1].dropout.train(),
    "loaded in place": lambda world: world.model.load_state_dict(state_of(world.model)),
    "loaded by assignment": lambda world: world.model.load_state_dict(state_of(world.model), assign=True),
    "weights in place": in_place,
    "layer": lambda world: world.model.__setitem__(1, Block().eval()),
    "inner layer": assigned("model.0", "linear", lambda: nn.Linear(8, 8)),
    "layer more": lambda world: world.model.append(Block().eval()),
    "layer less": lambda world: world.model.__delitem__(1),
    "layers swapped": swapped,
    "model": assigned("", "model", lambda: nn.Sequential(Block(), Block()).eval()),
    "weight": assigned("model.0.linear", "weight", lambda: nn.Parameter(torch.randn(8, 8))),
    "data of a weight": assigned("model.0.linear.weight", "data", lambda: torch.randn(8, 8)),
    "weight transposed in place": transposed,
    "bias": assigned("model.0.linear", "bias", lambda: None),
    "buffer": assigned("model.1", "mask", lambda: torch.randn(8)),
    "data of a buffer": assigned("model.1.mask", "data", lambda: torch.randn(8)),
    "tensor that is no parameter": assigned("model.1", "shift", lambda: torch.randn(8)),
    "that tensor narrowed": narrowed,
    "that tensor in place": lambda world: world.model[1].shift.normal_(),
    "activation": assigned("model.0", "activation", lambda: F.relu),
    "forward": assigned("model.0", "forward", lambda: lambda x: x * 3),
    "forward of a layer of PyTorch": assigned("model.0.linear", "forward", lambda: lambda x: x * 3),
    "forward of a class": patched(Block, "forward", lambda self, x: x * 2),
    "forward of a class of PyTorch": patched(nn.LayerNorm, "forward", lambda self, x: x * 2),
    "class": reclassed,
    "eps": assigned("model.0.norm", "eps", lambda: 0.5),
    "number": assigned("model.0", "scale", lambda: 0.5),
    "number of another type": assigned("model.0", "scale", lambda: torch.tensor(2.0, dtype=torch.float64)),
    "item of a dict": lambda world: world.model[0].options.update(gain=0.5),
    "item of a list in a dict": lambda world: world.model[0].options["more"].__setitem__(1, 9.0),
    "dict": assigned("model.0", "options", lambda: {"gain": 0.5, "more": [1.0, 0.5]}),
    "attribute of an object of a layer": assigned("model.0.shape", "gain", lambda: 0.5),
    "object of a layer": assigned("model.0", "shape", lambda: types.SimpleNamespace(apply=torch.exp)),
    "class attribute": patched(Shape, "power", 5),
    "shadowed class attribute": assigned("shape", "power", lambda: 8),
    "method of a class": patched(Shape, "apply", lambda self, x: x * 7),
    "hook": lambda world: world.model[0].register_forward_hook(lambda module, args, result: result * 2),
    "hook before": lambda world: world.model[0].linear.register_forward_pre_hook(lambda module, args: args[0] * 2),
    "hook of all modules": hook_of_all_modules,
    "dtype": converted(torch.float64),
    "precision": converted(torch.bfloat16),
    "parametrization": parametrized,
    "object": assigned("", "shape", Shape),
    "number of an object": assigned("shape", "gain", lambda: 0.5),
    "number of the function's object": assigned("", "scale", lambda: 0.5),
    "negative zero": assigned("", "scale", lambda: -0.0),
    "number of an object in a list": lambda world: setattr(world.parts[1]["shape"], "gain", 9.0),
    "element of a list": lambda world: world.parts.__setitem__(1, {"shape": types.SimpleNamespace(gain=4.0)}),
    "global tensor": globals_set("GAIN", torch.tensor(9.0)),
    "global number": globals_set("FACTOR", 0.1),
    "global function": globals_set("helper", torch.sin),
    "attribute of a Python module": patched(MODULE, "offset", 2.0),
    "attribute of a function": patched(helper, "extra", 0.75),
    "code of a function": patched(helper, "__code__", (lambda x: x + 3).__code__),
    "default of a function": patched(World.ask, "__defaults__", (3.0,)),
    "default of a keyword": patched(helper, "__kwdefaults__", {"shift": 2.0}),
    "default of a keyword in place": lambda world, monkeypatch: monkeypatch.setitem(
        helper.__kwdefaults__, "shift", 2.0
    ),
    "function of PyTorch": patched(F, "hardtanh", lambda x, *args: x * 3),
    "backend": backend,
    "default dtype": default_dtype,
    "autocast": assigned("", "context", lambda: functools.partial(torch.autocast, "cpu", torch.bfloat16)),
    "patched": lambda world: tk.patch(world.model),
    "dropout": lambda world: setattr(world.model.train()[0].dropout, "p", 0.1),
}


def same_after(change, function, plain, world, monkeypatch, arguments):
    """Calls of `function` equal those of `plain` before and after the change, unless they raise."""

    def calls(count):
        for number in range(count):
            torch.manual_seed(number)
            try:
                expected = plain(*arguments)
            except RuntimeError:  # such as different dtypes
                with pytest.raises(RuntimeError):
                    function(*arguments)
                continue
            torch.manual_seed(number)
            found = function(*arguments)
            assert found.dtype is expected.dtype
            assert torch.equal(found.isnan(), expected.isnan())
            rounding = 4 * torch.finfo(torch.float32).eps * expected[expected.isfinite()].abs().max().item()
            torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=max(1e-6, rounding))

    with torch.no_grad():
        calls(5)
        assert replays(function)
        try:
            change(world, monkeypatch) if change.__code__.co_argcount == 2 else change(world)
            calls(6)
        except RuntimeError as error:
            assert "graphed" in str(error)
        finally:
            getattr(world, "cleanup", lambda: None)()


def replays(function):
    return sum(map(len, function._captured.values()))


@pytest.mark.parametrize("name", ASKED)
def test_a_forward_pass_follows_what_changes(name, monkeypatch):
    world = World()
    function = tk.graphed(world.ask, warm_up_calls=1)
    monkeypatch.setitem(globals(), "GAIN", GAIN)
    same_after(ASKED[name], function, world.ask, world, monkeypatch, [torch.randn(3, 8)])


@pytest.mark.parametrize("seed", range(4))
def test_changes_follow_one_another(seed, monkeypatch):
    """Twelve changes of one world in random order; some undo others."""
    breaking = {"dtype", "precision", "default dtype", "layers swapped", "layer less", "global function"}
    names = sorted(ASKED.keys() - breaking)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))[:12]
    world, x = World(), torch.randn(3, 8)
    function = tk.graphed(world.ask, warm_up_calls=1)
    for number in order:
        try:
            same_after(ASKED[names[number]], function, world.ask, world, monkeypatch, [x])
        except AttributeError:  # removed by another change
            continue
        world.cleanup = lambda: None


def reached(model, how):
    """The same function of a model, reached in several ways."""
    holder = types.SimpleNamespace(model=model, parts=types.SimpleNamespace(inner=[{"model": model}]))
    layers, named = [model], {"model": (model,)}

    def by_default(x, model=model):
        return model(x)

    class Callable:
        def __init__(self):
            self.inner = holder

        def __call__(self, x):
            return self._through(x)

        def _through(self, x):
            return self.inner.model(x)

    @functools.wraps(by_default)
    def wrapped(*args):
        return by_default(*args)

    return {
        "itself": model,
        "closure": lambda x: model(x),
        "object": lambda x: holder.model(x),
        "object of an object": lambda x: holder.parts.inner[0]["model"](x),
        "list": lambda x: layers[0](x),
        "dict": lambda x: named["model"][0](x),
        "default": by_default,
        "partial": functools.partial(lambda model, x: model(x), model),
        "method": model.forward,
        "callable": Callable(),
        "method of an object": Callable()._through,
        "wrapped": wrapped,
        "without gradients": torch.no_grad()(lambda x: model(x)),
        "local function": lambda x: (lambda: holder.model(x))(),
        "local variable": lambda x: next(each(x) for each in layers),
        "getattr": lambda x: getattr(holder, "mod" + "el")(x),
    }[how]


@pytest.mark.parametrize("how", [
    "itself", "closure", "object", "object of an object", "list", "dict", "default", "partial", "method", "callable",
    "method of an object", "wrapped", "without gradients", "local function", "local variable", "getattr",
])  # fmt: skip
@pytest.mark.parametrize("name", ["mode", "loaded by assignment", "number", "hook"])
def test_a_model_is_found_however_it_is_reached(how, name, monkeypatch):
    world = World()
    plain = reached(world.model, how)
    same_after(ASKED[name], tk.graphed(plain, warm_up_calls=1), plain, world, monkeypatch, [torch.randn(3, 8)])


def test_a_variable_of_a_closure_may_be_bound_anew():
    model, x = World().model, torch.randn(3, 8)

    def function(x):
        return model(x)

    ask = tk.graphed(function, warm_up_calls=0)
    ask(x), ask(x)
    model = World().model[0]
    assert torch.equal(ask(x), function(x))


@pytest.mark.parametrize("values", [(0.0, -0.0), (1, True, 1.0), (-0.0, 0.0), (0.0j, -0.0j), (float("nan"), 2.0)])
def test_a_constant_is_known_by_its_bits(values):
    x = torch.tensor([1.0, 2.0])
    divided = tk.graphed(lambda x, by: 1 / (x * by), warm_up_calls=0)
    for value in (*values, *values):
        for _ in range(2):
            expected, found = 1 / (x * value), divided(x, value)
            assert torch.equal(torch.view_as_real(found + 0j).isnan(), torch.view_as_real(expected + 0j).isnan())
            assert str(found) == str(expected)
    assert replays(divided) == len(values)


def test_a_model_that_is_an_argument_is_compared_too():
    world, x = World(), torch.randn(3, 8)
    ask = tk.graphed(lambda model, x: model(x), warm_up_calls=0)
    ask(world.model, x), ask(world.model, x)
    world.model[0].scale = 7.0
    with torch.no_grad():
        assert torch.equal(ask(world.model, x), world.model(x))


def test_each_backend_has_a_graph_of_its_own():
    ask, x = tk.graphed(tk.gelu, warm_up_calls=0), torch.randn(8)
    for name in ("cpu", "torch", "cpu"):
        with tk.use_backend(name):
            assert torch.equal(ask(x), tk.gelu(x))
    assert replays(ask) == 2


def test_each_dtype_of_autocast_has_a_graph_of_its_own():
    world, x = World(), torch.randn(3, 8)
    ask = tk.graphed(world.model[0].linear, warm_up_calls=0)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            for _ in range(2):
                assert ask(x).dtype is dtype


def test_weights_that_autocast_has_cached_are_cast_in_each_replay():
    """Autocast caches casts of weights until its block ends; a replay must not read those of an earlier call."""
    world, x = World(), torch.randn(3, 8)
    model = world.model[0].linear
    ask = tk.graphed(model, warm_up_calls=1)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # with gradients, whose casts autocast caches
        for _ in range(3):
            ask(x)
        later = model(x).detach()
    in_place(world)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(ask(x), model(x))
    assert not torch.equal(later, model(x).detach().bfloat16())


def cleared(world):
    world.optimizer.state.clear()


def replaced_moment(world):
    for state in world.optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def moved_moment(world):
    for state in world.optimizer.state.values():
        state["exp_avg"].data = torch.zeros_like(state["exp_avg"])


def setting(name, value):
    return lambda world: world.optimizer.param_groups[0].update({name: value})


def group_added(world):
    extra = nn.Parameter(torch.ones(8))
    world.optimizer.add_param_group({"params": [extra]})
    world.model[0].mask = extra


def group_less(world):
    del world.optimizer.param_groups[0]["params"][3:]


def other_state(world):
    world.optimizer.state = defaultdict(dict)


def reloaded(world):
    world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))


def replaced_optimizer(world):
    world.optimizer.param_groups[0]["params"][:] = list(world.model[1].parameters())


def step_hook(world):
    def scaled(optimizer, args, kwargs):
        world.model[0].linear.weight.grad.mul_(1.5)

    world.optimizer.register_step_pre_hook(scaled)


def of_gradient(register):
    return lambda world: register(world.model[0].linear.weight)


def halved(parameter):
    parameter.grad.mul_(0.5)


TRAINED = {
    "nothing": lambda world: None,
    "rate": setting("lr", 0.5),
    "rate as a tensor": setting("lr", torch.tensor(0.25)),
    "decay": setting("weight_decay", 0.5),
    "betas": setting("betas", (0.1, 0.2)),
    "maximize": setting("maximize", True),
    "state cleared": cleared,
    "another state": other_state,
    "moment replaced": replaced_moment,
    "moment moved": moved_moment,
    "state reloaded": reloaded,
    "parameters added": group_added,
    "parameters taken away": group_less,
    "other parameters": replaced_optimizer,
    "hook of the step": step_hook,
    "hook of a gradient": of_gradient(lambda weight: weight.register_hook(lambda gradient: gradient * 2)),
    "second hook of a gradient": of_gradient(lambda weight: weight.register_hook(torch.zeros_like)),
    "hook after a gradient": of_gradient(lambda weight: weight.register_post_accumulate_grad_hook(halved)),
    "backward hook": lambda world: world.model[0].linear.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 2,)
    ),
    "frozen": frozen,
    "data of a weight": ASKED["data of a weight"],
    "layer": ASKED["inner layer"],
    "mode": ASKED["mode"],
    "weights in place": in_place,
    "loaded by assignment": ASKED["loaded by assignment"],
    "number": ASKED["number"],
    "hook": ASKED["hook"],
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_follows_what_changes(name):
    """Two runs of the same steps, one recorded: equal losses and weights, or an error."""
    results = []
    for recorded in (False, True):
        world = World()
        world.model[0].linear.weight.register_hook(lambda gradient: gradient * 1)
        step = tk.graphed(world.step, world.optimizer, warm_up_calls=2) if recorded else world.step
        data = torch.Generator().manual_seed(1)
        losses = []
        try:
            for number in range(14):
                if number == 6:
                    torch.manual_seed(4)
                    TRAINED[name](world)
                torch.manual_seed(number)
                losses.append(step(torch.randn(3, 8, generator=data)).item())
                world.optimizer.zero_grad()
        except RuntimeError as error:
            assert recorded and "graphed" in str(error)
            return
        results.append((losses, [each.detach() for each in world.model.parameters()]))
    assert replays(step)
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))
