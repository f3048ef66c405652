"""A call is a record: fields are accessed by name, not by position."""

import re
from pathlib import Path

OPS = Path(__file__).parents[2] / "transformer_kernels" / "ops"

BY_POSITION = re.compile(r"\bcall\[\d*:|\bcall\[[1-9]|\._make\(")
"""A slice of a call, a field of it by number (but the first, its first tensor), or a record of a bare sequence."""


def test_no_call_is_taken_apart_by_position():
    found = [
        f"{path.relative_to(OPS)}:{number}: {line.strip()}"
        for path in sorted(OPS.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BY_POSITION.search(line)
    ]
    assert not found, "\n".join(found)
