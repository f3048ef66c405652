"""Tests on several releases of transformers, torch or Triton, each in a throwaway environment.

    python -m tests.matrix                                          # the releases of transformers
    python -m tests.matrix torch triton                             # those of RELEASES for these packages
    python -m tests.matrix "transformers==5.12.*" "triton==3.5.*" --tests tests/patching -k bert

Each argument is a package of RELEASES or one row: requirements and options of pip, separated by spaces, that are
installed over this environment's packages. A row runs the tests of the package that it names first, or those after
`--tests`, which are passed to pytest. Prints a Markdown table; the exit status is 1 if a row failed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
RELEASES = {
    "transformers": [  # the first two import another release of kernels
        "transformers==5.10.* kernels==0.12.*",
        "transformers==5.14.* kernels==0.15.*",
        *(f"transformers==5.{minor}.*" for minor in (18, 22, 23, 24)),
    ],
    "torch": [*(f"torch==2.{minor}.*" for minor in (6, 9, 13)), "torch --upgrade"],
    "triton": [*(f"triton==3.{minor}.*" for minor in range(4, 9)), "triton --upgrade"],
}
PATCHED = ["patching", "test_huggingface.py"]
TESTS = {
    "transformers": PATCHED,
    "torch": [*PATCHED, "graphs", "ops/test_every_operation.py", "test_autograd.py", "test_nn.py"],
    "triton": [
        *("test_triton.py", "gates/test_triton_aot.py", "ops/test_every_operation.py"),
        *sorted(f"ops/{path.name}" for path in (CHECKOUT / "tests" / "ops").glob("*_triton.py")),
    ],
}
PACKAGES = ("transformers", "huggingface_hub", "tokenizers", "torch", "triton")
OUTCOMES = ("passed", "failed", "errors", "skipped")
VERSIONS = f"""
import importlib.metadata, json
installed = reversed([*importlib.metadata.distributions()])
found = {{each.metadata["Name"].replace("-", "_"): each.version for each in installed}}
print(json.dumps([found.get(name, "-") for name in {PACKAGES}]))
"""


def environment(folder, requirements):
    """The interpreter of a new environment with the packages of this one, under those of the requirements."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    own = Path(_output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    (own / "zz_outer.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind its own in sys.path
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    subprocess.run(command, check=True)
    return python


def _output(python, *arguments):
    return subprocess.run([python, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def run(python, options):
    """The outcomes of pytest by their number, and the end of its output."""
    command = [python, "-m", "pytest", *options, "-m", "not slow", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=CHECKOUT, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)
    lines = result.stdout.strip().splitlines() or [result.stderr.strip()[-300:]]
    counts = {f"{name.rstrip('s')}s" if "error" in name else name: int(number)
              for number, name in re.findall(r"(\d+) (passed|failed|errors?|skipped)", lines[-1])}  # fmt: skip
    if result.returncode and not counts.get("failed"):
        counts["errors"] = max(1, counts.get("errors", 0))
    return counts, "\n".join(line for line in lines if line.startswith(("FAILED", "ERROR", "E   ")))


def row(requirements, tests):
    """Install, run, and print one row; whether every test passed."""
    options = tests or [f"tests/{name}" for name in TESTS[re.match(r"\w+", requirements[0])[0]]]
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        try:
            python = environment(Path(folder), requirements)
        except subprocess.CalledProcessError as error:
            print(f"| {' '.join(requirements)} | not installed: pip ended with {error.returncode} |", flush=True)
            return False
        versions = json.loads(_output(python, "-c", VERSIONS))
        counts, report = run(python, options)
    print(f"| {' | '.join([*versions, *(str(counts.get(name, 0)) for name in OUTCOMES)])} |", flush=True)
    print(report, file=sys.stderr, flush=True)
    return not counts.get("failed") and not counts.get("errors")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="REQUIREMENTS", help="a package or one row each")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, help="what pytest is given")
    given = parser.parse_args()
    columns = [*PACKAGES, *OUTCOMES]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)
    rows = [row for each in given.rows or ["transformers"] for row in RELEASES.get(each, [each])]
    passed = [row(each.split(), given.tests) for each in rows]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
