"""docs/corrections.md: what a document prints and what is right, each computed by a test of that document."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "corrections.md"


def tables(document):
    """The tables of a document's section: rows by their first cell."""
    section = re.search(rf"^## {document}\b.*?\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.M | re.S)[1]
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", section, re.M):
        rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
        found.append({row[0]: row[1:] for row in rows})
    return found


def corrections(document):
    """The cells (printed, correct) of each row of a document's first table."""
    return tables(document)[0]


def shown(values, digits=4):
    """Numbers as the page shows them: rounded, separated by spaces; rows by slashes."""
    values = torch.as_tensor(values, dtype=torch.float64)
    rows = values.view(-1, values.shape[-1]) if values.dim() else values.view(1, 1)
    return " / ".join(" ".join(f"{value + 0.0:.{digits}f}" for value in row) for row in rows.tolist())
