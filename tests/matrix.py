"""The tests of patched models on several releases of transformers, each in a throwaway environment.

    python -m tests.matrix                                          # the releases of RELEASES
    python -m tests.matrix "transformers==5.12.*" "triton==3.5.*" --tests tests/patching -k bert

Each argument is one row: requirements, separated by spaces, that are installed over this environment's packages. What
follows `--tests` is passed to pytest. Prints a Markdown table; the exit status is 1 if a row failed.
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
RELEASES = ["transformers==5.10.* kernels==0.12.*", "transformers==5.14.* kernels==0.15.*"]  # each imports kernels
RELEASES += [f"transformers=={release}.*" for release in ("5.18", "5.22", "5.23", "5.24")]
TESTS = ["tests/patching", "tests/test_huggingface.py"]
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


def row(requirements, options):
    """Install, run, and print one row; whether every test passed."""
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
    parser.add_argument("rows", nargs="*", metavar="REQUIREMENTS", help="one row each")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, default=TESTS, help="what pytest is given")
    given = parser.parse_args()
    columns = [*PACKAGES, *OUTCOMES]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)
    passed = [row(each.split(), given.tests) for each in given.rows or RELEASES]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
