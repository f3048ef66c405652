"""`transformer-kernels run [--backend NAME] [--autocast bfloat16] script.py args...`: a program inside `accelerate`."""

from __future__ import annotations

import argparse
import atexit
import builtins
import functools
import io
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from transformer_kernels.backends.dispatch import BACKENDS
from transformer_kernels.ops._reproducible import Reproducible, reproducible
from transformer_kernels.patching._accelerate import Acceleration, accelerate_everywhere
from transformer_kernels.patching.graph._everywhere import CompiledEverywhere

DESCRIPTION = """\
Run a Python program whose calls of torch.nn.functional are computed by this package where that is exact, as by
`with transformer_kernels.accelerate()` around it, in every thread. Processes that it starts afresh are not accelerated;
under torchrun write: torchrun --no-python transformer-kernels run train.py ...

  transformer-kernels run train.py --steps 100
  transformer-kernels run --backend cpu -m package.train --steps 100
  transformer-kernels run --autocast bfloat16 train.py --steps 100
  transformer-kernels run --compile train.py --steps 100
  transformer-kernels run --certify train.py --steps 100
  transformer-kernels run --reproducible train.py --steps 100

With --compile each module that the program calls is compiled by torch.compile with the backend "transformer_kernels" at
its first call, and what it computes by hand is recognised too. What cannot be compiled runs as it is.

With --certify a sample of the operations is checked against float64 meanwhile, by at most 3 % of the time; the result
is one line, and certificate.json in the folder in which the program was started.

With --reproducible results have the same bits on every CPU with AVX2, at any number of threads: the random numbers,
products and AdamW of the main thread included. What PyTorch computes in another order is named.

The last line, on the standard error, counts the calls and names what was left to PyTorch.
"""


def main(arguments: Sequence[str], certify: Callable[[Path], AbstractContextManager[Any]]) -> int:
    """Run a program as Python does; this process raises its exceptions and exits with its status.

    `certify` is `transformer_kernels.certify`, of a higher floor.
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    program, is_module = list(chosen.program), chosen.module is not None
    if not is_module and not program:
        parser.error("a script or -m MODULE is needed")
    target = chosen.module if is_module else program.pop(0)
    if not is_module and not Path(target).exists():
        print(f"transformer-kernels run: can't open file {target!r}: there is none", file=sys.stderr)
        return 2
    block: Acceleration | CompiledEverywhere
    if chosen.compile:
        block = CompiledEverywhere(chosen.backend)
        block.start()
    else:
        block = accelerate_everywhere(chosen.backend)
    if chosen.reproducible:
        mode = reproducible().__enter__()
        atexit.register(_close_reproducible, mode)
    if chosen.autocast is not None:
        _enter_autocast(getattr(torch, chosen.autocast))
    atexit.register(_close, block)
    if chosen.certify:
        certified = certify(Path("certificate.json").absolute())
        atexit.register(_close_certificate, certified, certified.__enter__())
    sys.excepthook = functools.partial(_show_from_program, sys.excepthook)
    sys.argv[:] = [target, *program]
    sys.path[0] = os.getcwd() if is_module else str(Path(target).resolve().parent)
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif Path(target).is_file() and not zipfile.is_zipfile(target):
        _run_script(os.path.abspath(target))
    else:
        runpy.run_path(target, run_name="__main__")  # a folder or an archive with a __main__.py
    return 0


def _enter_autocast(dtype: torch.dtype) -> None:
    """Enable autocast in this thread until the process ends, on the CPU and on GPUs.

    Its cache is disabled: it holds casts of weights until the outermost block ends, past the optimizer's steps.
    """
    torch.set_autocast_cache_enabled(False)
    for device in ("cpu", "cuda"):
        torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_enabled(device, True)


def _run_script(path: str) -> None:
    """Run a file as __main__, whose `__file__` is absolute beside an argv[0] as it was given; runpy has one of both."""
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(module))


def _close(block: Acceleration | CompiledEverywhere) -> None:
    """Print the closing line, after the output of the program and of its own exit handlers."""
    line = block.line() if isinstance(block, CompiledEverywhere) else block.report().line()
    print(f"transformer-kernels: {line}", file=sys.stderr)


def _close_certificate(certified: AbstractContextManager[Any], certificate: Any) -> None:
    certified.__exit__(None, None, None)
    print(f"transformer-kernels: certificate: {certificate}", file=sys.stderr)


def _close_reproducible(mode: Reproducible) -> None:
    named = ", ".join(f"{name} ({count})" for name, count in mode.uncovered.most_common())
    print(f"transformer-kernels: reproducible, but for: {named or 'nothing'}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "transformer-kernels run", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    backends = "torch, cpu, triton, cuda or auto (default: as set by the environment, else auto)"
    parser.add_argument("--backend", choices=(*BACKENDS, "auto"), help=backends)
    automatic = "torch.autocast around the whole program, in its main thread: losses, backward and optimizer included"
    parser.add_argument("--autocast", choices=("bfloat16",), help=automatic)
    recognised = "recognise what modules compute by hand too, in the graphs of torch.compile"
    parser.add_argument("--compile", action="store_true", help=recognised)
    checked = "check a sample of the operations against float64, and write certificate.json"
    parser.add_argument("--certify", action="store_true", help=checked)
    same = "results have the same bits on every CPU; what may differ is named"
    parser.add_argument("--reproducible", action="store_true", help=same)
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module as a script, as python -m does")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="script.py ...", help="the script and its arguments"
    )
    return parser


def _show_from_program(show: Any, kind: Any, error: BaseException, frames: Any) -> None:
    """Report an exception that the program did not catch, from its own first frame on."""
    between, within = (__file__, runpy.__file__, "<frozen runpy>"), False
    first = frames  # a chain of traceback objects
    while first is not None and (not within or first.tb_frame.f_code.co_filename in between):
        within = within or first.tb_frame.f_code.co_filename == __file__
        first = first.tb_next
    frames = first if within else frames
    show(kind, error.with_traceback(frames), frames)
