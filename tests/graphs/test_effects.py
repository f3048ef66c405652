"""CPU recordings of operators with undeclared effects, and of memory that does not stay."""

import functools
import random
import threading
from collections import Counter

import numpy
import pytest
import torch
from torch.utils import _pytree as pytree

import transformer_kernels as tk
from tests.support.day import EVERY
from transformer_kernels.backends import cpu
from transformer_kernels.graphs import _effects
from transformer_kernels.graphs._host import HostGraphs, in_one_piece

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built"
)


@functools.cache
def _foreign():
    """The operators are defined once: PyTorch lists those of a library that was destroyed, and cannot read them."""
    library = torch.library.Library("undeclared", "FRAGMENT")
    calls = Counter()

    def triple(x):
        calls["triple"] += 1
        x.mul_(3)

    def in_place(x):
        return x.mul_(3)

    def both(x, y):
        y.mul_(3)
        return x + 1, y

    def several(values):
        for each in values:
            each.mul_(3)
        return values

    operators = {
        "triple(Tensor x) -> ()": triple,
        "in_place(Tensor x) -> Tensor": in_place,
        "both(Tensor x, Tensor y) -> (Tensor, Tensor)": both,
        "several(Tensor[] values) -> Tensor[]": several,
        "noise(Tensor x) -> Tensor": lambda x: x + torch.rand(3),
        "count(Tensor x) -> int": lambda x: int(x.sum()),
        "positive(Tensor x) -> Tensor": lambda x: x[x > 0],
    }
    for schema, function in operators.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")
    return torch.ops.undeclared, calls, library


@pytest.fixture
def foreign():
    """Operators of another library, whose schemas do not declare what they do, and the counts of their calls."""
    operators, calls, _ = _foreign()
    calls.clear()
    return operators, calls


def runs(name, operators):
    def in_own_memory(x):
        y = x * 2
        getattr(operators, name)(y)
        return y + 1

    def pair(x):
        y = x * 2
        made, _ = operators.both(x, y)
        return made + y

    def several(x):
        pair = [x * 2, x * 5]
        operators.several(pair)
        return pair[0] + pair[1]

    return {"both": pair, "several": several}.get(name, in_own_memory)


@pytest.mark.parametrize("name", ["triple", "in_place", "both", "several"])
def test_a_write_that_no_schema_declares_is_repeated(name, foreign):
    """At the capture the operator's result equals its input."""
    work = runs(name, foreign[0])
    x = torch.zeros(3)
    replay = HostGraphs().capture(lambda: work(x))
    assert torch.equal(replay(), work(torch.zeros(3)))
    for _ in range(2):
        x.normal_()
        assert torch.equal(replay(), work(x.clone()))


def test_writes_to_memory_of_others_are_undone_before_the_validation(foreign):
    weight, x = torch.ones(3), torch.ones(3)
    operators, calls = foreign

    def work():
        operators.triple(weight)
        return weight + x

    before = calls["triple"]
    replay = HostGraphs().capture(work)
    assert weight.tolist() == [3.0] * 3 and calls["triple"] == before + 4
    assert replay().tolist() == [4.0] * 3
    assert replay().tolist() == [10.0] * 3


def test_a_call_that_changes_nothing_at_the_capture_is_missed_on_other_values():
    """It bypasses the dispatcher, and rounds what is whole."""
    weight, x = torch.ones(3), torch.zeros(3)
    memory = weight.numpy()

    def work(x=x):
        weight.add_(x)
        numpy.floor(memory, out=memory)
        return weight + 1

    with pytest.raises(RuntimeError, match="its replay computes other values"):
        HostGraphs().capture(work, [x])
    assert weight.tolist() == [1.0] * 3 and x.tolist() == [0.0] * 3


def test_work_that_does_not_accept_other_values_is_recorded_on_its_own():
    scale, x = torch.ones(3), torch.ones(3)

    def only_ones():
        scale.mul_(1)
        in_one_piece(refuse_others, scale)
        return scale * x

    def refuse_others(scale):
        if not torch.equal(scale, torch.ones(3)):
            raise ValueError("not one")

    replay = HostGraphs().capture(only_ones, [x])
    replay()
    x.fill_(5)
    assert replay().tolist() == [5.0] * 3
    assert scale.tolist() == [1.0] * 3


def test_observers_see_no_changed_values():
    graphs, seen, x = HostGraphs(), [], torch.ones(3)
    observe = graphs.on_host(lambda value: seen.append(value.sum().item()))

    def work():
        y = x * 2
        observe(y)
        return y + 1

    replay = graphs.capture(work, [x])
    replay()
    x.fill_(2)
    replay()
    assert seen == [6.0, 6.0, 12.0]  # the first run, its validation, the second replay


def test_state_that_the_first_run_creates_is_refused():
    state = {}

    def work():
        if not state:
            state["count"] = torch.zeros(1) + 0
        state["count"].add_(1)
        return torch.ones(3)

    with pytest.raises(RuntimeError, match="it writes to memory that its first call has created"):
        HostGraphs().capture(work)


def test_random_numbers_of_an_operator_are_drawn_by_each_replay(foreign):
    x = torch.zeros(3)
    replay = HostGraphs().capture(lambda: foreign[0].noise(x))
    replay()
    torch.manual_seed(5)
    found = replay().clone()
    torch.manual_seed(5)
    assert torch.equal(found, torch.rand(3))


def test_an_operator_that_returns_a_number_is_refused_by_name(foreign):
    with pytest.raises(RuntimeError, match=r"undeclared::count reads values on the host: it returns int"):
        HostGraphs().capture(lambda: torch.ones(3) * foreign[0].count(torch.ones(3)))


def test_a_result_of_another_shape_is_refused_in_the_replay(foreign):
    x = torch.ones(3)
    replay = HostGraphs().capture(lambda: foreign[0].positive(x) + 1)
    replay()
    x[0] = -1
    with pytest.raises(RuntimeError, match=r"undeclared::positive returned shape \(3,\) at the capture and now \(2,\)"):
        replay()


def test_only_namespaces_with_complete_schemas_are_trusted():
    """The dispatcher's other namespaces are recorded as calls; whoever trusts one more adds it here, too."""
    namespaces = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
    assert namespaces >= {"c10d", "_c10d_functional", "fsdp", "quantized", "inductor"}
    assert {"aten", "prims"} == _effects.DECLARED
    assert {"profiler"} == _effects.ANNOTATIONS
    for name in _effects.ALIASES:
        space, _, operator = name.partition("::")
        if space == "aten":  # only returns an argument's memory
            assert not getattr(torch.ops.aten, operator).default._schema.is_mutable


class Weight:
    def __init__(self):
        self.whole, self.shard = torch.zeros(1000), torch.ones(1000)
        self.storage = self.whole.untyped_storage()
        self.size = self.storage.nbytes()


def write_and_free(x, weight):
    weight.storage.resize_(weight.size)
    weight.whole.copy_(weight.shard)
    y = x + weight.whole
    weight.storage.resize_(0)
    return y


def free_and_write(x, weight):
    y = x + weight.whole
    weight.storage.resize_(0)
    weight.storage.resize_(2 * weight.size)  # not at the same address by luck
    weight.whole.copy_(weight.shard)
    return y + weight.whole


def free_own(x, weight):
    y = x * 2
    z = y + 1
    y.untyped_storage().resize_(0)
    return z


def free_the_result_of_a_kernel(x, weight):
    y = tk.gelu(x, backend="cpu")
    y.untyped_storage().resize_(0)
    return x + 1


def grow(x, weight):
    y = torch.ones(3)
    y.resize_(2000)
    return y[:3] + x[:3]


def grow_by_out(x, weight):
    return torch.add(x, x, out=torch.ones(3))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    "function, named",
    [
        (write_and_free, "aten::copy_"),
        (free_and_write, "aten::add"),
        (free_own, "aten::mul"),
        (free_the_result_of_a_kernel, "a kernel"),
        (grow, "aten::resize_"),
        (grow_by_out, "aten::ones"),
    ],
)
def test_a_capture_keeps_no_pointer_to_memory_that_goes(function, named):
    weight, x = Weight(), torch.randn(1000)
    with pytest.raises(RuntimeError, match=rf"{named} (uses was freed or resized|resizes memory)"):
        HostGraphs().capture(lambda: function(x, weight))
    assert torch.equal(HostGraphs().capture(lambda: x + 1)(), x + 1)


@pytest.mark.parametrize("size", [0, 8000])
def test_memory_that_went_after_the_capture_is_not_read(size):
    weight, x = torch.ones(1000), torch.randn(1000)
    replay = HostGraphs().capture(lambda: tk.gelu(x, backend="cpu") + weight)
    replay()
    weight.untyped_storage().resize_(size)
    with pytest.raises(RuntimeError, match=r"graphed: the memory that aten::add uses was freed or resized"):
        replay()


def test_data_that_is_swapped_is_followed():
    weight = torch.nn.Parameter(torch.ones(3))
    step = tk.graphed(lambda x: x * weight, warm_up_calls=0)
    for value in (1.0, 2.0, 3.0):
        weight.data = torch.full((3,), value)
        assert step(torch.ones(3)).tolist() == [value] * 3


def test_layouts_that_change_in_place_are_followed():
    x = torch.randn(4, 6)

    def work():
        y = x * 2
        y.t_()
        y.unsqueeze_(0)
        y.add_(1)
        z = torch.empty(0)
        torch.add(y, y, out=z)
        return z.squeeze_(0) + y[0]

    replay = HostGraphs().capture(work)
    replay()
    for _ in range(2):
        x.normal_()
        assert torch.equal(replay(), work())


@pytest.mark.parametrize("draws", [False, True])
def test_a_thread_that_draws_random_numbers_beside_a_capture(draws):
    """It disturbs only a capture that draws some itself, and the error says so."""
    x = torch.randn(8)

    def beside(count):
        thread = threading.Thread(target=torch.rand, args=(count,))
        thread.start()
        thread.join()

    def work():
        beside(3)
        return x + 1

    def disturbed():
        beside(next(counts))
        return x + torch.rand(8)

    counts = iter((3, 4))
    if draws:
        with pytest.raises(RuntimeError, match=r"draws other random numbers.* no other thread may draw"):
            HostGraphs().capture(disturbed)
        return
    state = torch.get_rng_state()
    assert torch.equal(HostGraphs().capture(work)(), x + 1)
    assert not torch.equal(torch.get_rng_state(), state)  # the thread's numbers are not drawn again


def calls_with_effects(operators):
    """Calls on values, memory outside of the recording, and a choice; at zeros most of them change nothing."""
    return [
        lambda x, outside, choice: operators.triple(choice.choice([x, outside])),
        lambda x, outside, choice: operators.in_place(x).add_(outside),
        lambda x, outside, choice: operators.both(x, outside)[1].mul_(0.5),
        lambda x, outside, choice: operators.several([x, outside]),
        lambda x, outside, choice: x.add_(operators.noise(x) * x),
        lambda x, outside, choice: outside.add_(x),
        lambda x, outside, choice: x.floor_(),
        lambda x, outside, choice: x.clamp_(max=choice.random()),
        lambda x, outside, choice: torch.mul(x, 1 + outside.abs(), out=x),
        lambda x, outside, choice: x.masked_fill_(outside > 0.5, 0.0),
        lambda x, outside, choice: x[1:].copy_(outside[:-1]),
        lambda x, outside, choice: torch.sum(x.view(3, 1).expand(3, 2), 1, out=outside),
        lambda x, outside, choice: outside.add_(torch.rand(3) * x),
        lambda x, outside, choice: torch._foreach_add_([x, outside], [outside.clone(), x.clone()]),
    ]


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_with_side_effects_are_replayed(foreign, seed):
    """They are captured on zeros and replayed on other values."""
    choice = random.Random(seed)
    program = [(choice.choice(calls_with_effects(foreign[0])), choice.random()) for _ in range(6)]
    x, outside = torch.zeros(3), torch.zeros(3)

    def work():
        y = x * 2
        for call, number in program:
            call(y, outside, random.Random(number))
        return y + 1

    replay = HostGraphs().capture(work, [x])
    replay()
    for _ in range(2):
        values, state = torch.randn(2, 3), torch.get_rng_state()
        results = []
        for run in (work, replay):
            torch.set_rng_state(state)
            x.copy_(values[0])
            outside.copy_(values[1])
            results.append([run().clone(), outside.clone(), torch.get_rng_state()])
        assert all(map(torch.equal, *results))


def drawn(seed, count):
    """Operators of PyTorch's own tests, with their inputs."""
    tested = pytest.importorskip("torch.testing._internal.common_methods_invocations", exc_type=ImportError)
    choice = random.Random(seed)
    known = [each for each in tested.op_db if torch.float32 in each.dtypes and not each.name.startswith("empty")]
    for operator in choice.sample(known, min(count, len(known))):
        torch.manual_seed(seed)
        samples = list(operator.sample_inputs("cpu", torch.float32, requires_grad=False))
        for sample in choice.sample(samples, min(2, len(samples))):
            leaves, layout = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            if all(each.layout is torch.strided for each in leaves if isinstance(each, torch.Tensor)):
                yield operator, leaves, layout


def values_of(result):
    return [each.clone() for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]


def follows(operator, leaves, layout):
    """Whether a replay on other values equals the function; None: refused, or the operator does not take them."""
    own = [each.clone() if isinstance(each, torch.Tensor) else each for each in leaves]
    floats = [each for each in own if isinstance(each, torch.Tensor) and each.is_floating_point()]

    def work():
        given, args, options = pytree.tree_unflatten(own, layout)
        with torch.no_grad():
            return operator(given, *args, **options)

    begun = [each.clone() for each in floats]

    def reset(scale, seed):
        for each, value in zip(floats, begun, strict=True):
            each.copy_(value * scale)
        torch.manual_seed(seed)

    try:
        reset(1.0, 1)
        replay = HostGraphs().capture(work)
    except Exception:
        return None
    replay()
    reset(0.7, 2)
    try:
        expected = [*values_of(work()), *values_of(own), torch.get_rng_state()]
    except Exception:
        return None
    reset(0.7, 2)
    found = [*values_of(replay()), *values_of(own), torch.get_rng_state()]
    return all(torch.allclose(each, other, equal_nan=True) for each, other in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [60, pytest.param(6_000 // EVERY, marks=pytest.mark.slow)])
def test_operators_of_the_dispatcher_are_replayed(count):
    """Operators are drawn from all that PyTorch tests; no replay may leave one out."""
    followed = Counter()
    for operator, leaves, layout in drawn(count, count):
        same = follows(operator, leaves, layout)
        assert same is not False, (operator.name, operator.variant_test_name)
        followed[same] += 1
    assert followed[True] > 0.9 * sum(followed.values())
