"""CPU recordings of operators drawn from the whole dispatcher, with arguments generated from their schemas.

Each operator is called, recorded, and replayed on other values; the replay must write what a second call writes. The
walk runs in a process of its own, since operators that PyTorch does not test may crash on such arguments.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.support.day import EVERY

CHECKOUT = Path(__file__).resolve().parents[2]

UNINITIALISED = ("empty", "resize", "new_empty", "_empty", "set_")
"""Parts of names of operators whose results are uninitialised or memory of others."""

ENDS = ("abort", "_assert", "warn", "breakpoint", "crash", "from_file", "set_data", "backward.default", "recv")
ENDS += ("transformer_kernels::",)
"""Parts of names of operators that a test cannot call; our own trust their arguments, which operations have checked."""

SECONDS = 20
"""Time of one operator: some wait for other processes."""

SHAPES = ((3, 3), (2, 3, 3), (3,), (1, 3, 4, 4), (4, 3), ())
ATTEMPTS = 12

NAMED = {"dtype": torch.float32, "layout": torch.strided, "memory_format": None, "group_name": "0", "reduce_op": "sum"}
"""Values of arguments whose type in the schema is int or str."""


def overloads():
    """The names of all operators with a schema, in a fixed order."""
    names = {f"{schema.name}.{schema.overload_name or 'default'}" for schema in torch._C._jit_get_all_schemas()}
    return sorted(name for name in names if "::" in name)


def operator_of(name):
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


def value_of(kind, choice, shape, dtype):
    """A value of a schema's type; raises KeyError for types without one."""
    if kind.startswith("Optional["):
        return None if choice.random() < 0.5 else value_of(kind[9:-1], choice, shape, dtype)
    if kind == "Tensor":
        value = torch.randn(shape).to(dtype)
        return value.abs() if value.dtype is torch.int64 else value  # it may be an index
    if kind.startswith("List["):
        count = 2 if "Tensor" in kind else choice.choice((1, 2, max(1, len(shape))))
        return [value_of(kind[5:-1], choice, shape, dtype) for _ in range(count)]
    return {
        "int": (number := choice.choice((0, 1, 2, 3))),
        "SymInt": number,
        "float": choice.choice((0.5, 1.0)),
        "number": choice.choice((0.5, 1, 2)),
        "bool": choice.choice((False, True)),
        "str": choice.choice(("sum", "mean", "none", "0")),
        "Device": torch.device("cpu"),
        "Generator": torch.default_generator,
        "Layout": torch.strided,
        "ScalarType": torch.float32,
        "__torch__.torch.classes.c10d.ProcessGroup": _group(),
    }[kind]


def _group():
    world = torch.distributed.group.WORLD
    return None if world is None else world.boxed()


def arguments_of(operator, choice):
    """Positional and keyword arguments, by the types of the schema."""
    shape, dtype = choice.choice(SHAPES), choice.choice((torch.float32,) * 4 + (torch.int64, torch.bool))
    given, options = [], {}
    for each in operator._schema.arguments:
        if each.has_default_value() and choice.random() < 0.7:
            value = each.default_value
        else:
            varied = dtype if choice.random() < 0.8 else torch.int64
            value = value_of(str(each.type), choice, shape, varied)
            if each.name in NAMED and value is not None:
                value = NAMED[each.name]
        if each.kwarg_only:
            options[each.name] = value
        else:
            given.append(value)
    return given, options


def copies(values):
    return pytree.tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, values)


def tensors_of(values):
    return [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]


def same(one, two):
    for a, b in zip(one, two, strict=True):
        if a.shape != b.shape or a.dtype is not b.dtype or a.layout is not b.layout:
            return False
        if a.layout is not torch.strided or a.is_quantized:
            continue
        if not torch.allclose(a.to(torch.complex128), b.to(torch.complex128), rtol=1e-3, atol=1e-4, equal_nan=True):
            return False
    return len(one) == len(two)


def called(operator, arguments):
    """The result, when a collective has written it."""
    result = operator(*arguments[0], **arguments[1])
    for handle in pytree.tree_leaves(result):
        if isinstance(handle, torch.ScriptObject) and hasattr(handle, "wait"):
            handle.wait()
    return result


def walked(name, seed, say):
    """What became of an operator: replayed, refused: REASON, not callable, or omitted."""
    from transformer_kernels.graphs._host import HostGraphs

    operator, choice = operator_of(name), random.Random(f"{name} {seed}")
    say("called")
    torch.manual_seed(choice.getrandbits(32))
    for _ in range(ATTEMPTS):
        try:
            given = arguments_of(operator, choice)
            torch.manual_seed(1)
            with torch.no_grad():
                first = called(operator, own := copies(given))
            if [each.shape for each in tensors_of(own)] != [each.shape for each in tensors_of(given)]:
                given = copies(own)  # it resizes its outputs, which a recording refuses
            others = pytree.tree_map(_other, given)
            torch.manual_seed(2)
            with torch.no_grad():
                expected = [*tensors_of(called(operator, own := copies(others))), *tensors_of(own)]
            expected = copies([*expected, torch.get_rng_state()])
        except Exception:
            continue
        break
    else:
        return "not callable"
    if not tensors_of((first, given)):
        return "without tensors"
    say("recorded")
    own = copies(given)

    def work():
        with torch.no_grad():
            result = called(operator, own)
        return pytree.tree_map(lambda each: each if isinstance(each, torch.Tensor) else None, result)

    torch.manual_seed(1)
    try:
        replay = HostGraphs().capture(work, tensors_of(own))
        replay()
    except Exception as error:
        return f"refused: {str(error).partition(chr(10))[0][:150]}"
    try:
        for mine, other in zip(tensors_of(own), tensors_of(others), strict=True):
            mine.copy_(other)
        torch.manual_seed(2)
        found = [*tensors_of(replay()), *tensors_of(own), torch.get_rng_state()]
    except Exception as error:
        return f"refused: replay: {str(error).partition(chr(10))[0][:150]}"
    return "replayed" if same(found, expected) else "omitted"


def _other(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value * 0.5 if value.is_floating_point() else value.clone()


def main(path, seed, names):
    """Append a line for each operator to a file, before and after each phase."""
    import warnings

    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with open(path, "a", buffering=1) as file:
        for name in names:
            signal.alarm(SECONDS)
            say = lambda phase, name=name: file.write(json.dumps([name, phase]) + "\n")  # noqa: E731
            try:
                say(walked(name, seed, say))
            except Exception as error:
                say(f"not callable: {type(error).__name__}")


def walk(names, folder, seed=0):
    """The outcome of each operator; an operator that ends the process is skipped."""
    path, outcomes = folder / "walk.jsonl", {}
    path.touch()
    while left := [name for name in names if name not in outcomes]:
        call = f"main({str(path)!r}, {seed}, json.load(sys.stdin))"
        program = f"import json, sys; from tests.graphs.test_dispatcher import main; {call}"
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-c", program],
                input=json.dumps(left),
                text=True,
                env=environment,
                cwd=folder,
                capture_output=True,
                timeout=60 + len(left),
            )
        phases = dict(json.loads(line) for line in path.read_text().splitlines())
        outcomes = {
            name: {"called": "not callable", "recorded": "omitted: the process ended"}.get(phase, phase)
            for name, phase in phases.items()
        }
        if not any(name in outcomes for name in left):
            raise AssertionError("the walk does not start")
    return outcomes


def drawn(count, seed):
    known = [name for name in overloads() if not any(each in name for each in (*UNINITIALISED, *ENDS))]
    return random.Random(seed).sample(known, min(count, len(known)))


IGNORE_OUT = "aten::linalg_matrix_rank."
"""Overloads by which PyTorch does not write to `out` while any dispatch mode is active, so none can record that."""


@pytest.mark.parametrize("count", [60, pytest.param(6_000 // EVERY, marks=pytest.mark.slow)])
def test_no_operator_of_the_dispatcher_is_omitted(count, tmp_path):
    outcomes = walk(drawn(count, 5), tmp_path)
    kinds = Counter(each.partition(":")[0] for each in outcomes.values())
    omitted = [name for name, each in outcomes.items() if each.startswith("omitted")]
    assert [name for name in omitted if not name.startswith(IGNORE_OUT)] == []
    assert kinds["replayed"] > 0.3 * len(outcomes) and kinds["refused"] < 0.05 * len(outcomes), kinds
