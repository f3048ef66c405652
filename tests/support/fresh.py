"""Python programs in processes of their own that have imported torch and nothing else.

They are forked from one process that has imported torch, which takes 1.5 s of a processor in each new Python.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch"])


def python(code, *arguments, folder=ROOT, **environment):
    """Runs code as `python -c` in this folder, with variables added to the environment or, where None, removed.

    Returns a subprocess.CompletedProcess with the text of stdout and stderr.
    """
    merged = {name: value for name, value in (os.environ | environment).items() if value is not None}
    with tempfile.TemporaryDirectory() as outputs:
        given = code, list(arguments), str(folder), merged, outputs
        process = _context.Process(target=_run, args=given)
        process.start()
        process.join(timeout=240)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(code)
        stdout, stderr = ((Path(outputs) / name).read_text() for name in ("1", "2"))
    return subprocess.CompletedProcess(code, process.exitcode, stdout, stderr)


def checked(code, *arguments, **options):
    """What the code prints, stripped; fails with the end of stderr if its status is not 0."""
    finished = python(code, *arguments, **options)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout.strip()


def _run(code, arguments, folder, environment, outputs):
    for descriptor in (1, 2):
        os.dup2(os.open(f"{outputs}/{descriptor}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, sys.path[:0] = ["-c", *arguments], ["", str(ROOT)]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
