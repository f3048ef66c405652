"""Hooks of the site: the API reference as a page, and links to files outside docs/ as their paths."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
MODELS = "patch unpatch accelerate graphed build bind load_pretrained export_pretrained"
BACKENDS = "explain use_backend set_backend get_backend BackendUnavailable UnsupportedByBackend"
INTRODUCTION = """# API reference

Generated from the docstrings. Shapes: B batch, H heads (Hq of queries, Hk of keys), L tokens, D columns of a head.
The argument `backend` selects the implementation ([backends](backends.md#choosing-a-backend)).
"""


def operations():
    """The full name of each public operation; some have the name of their module."""
    imports = (ROOT / "transformer_kernels" / "ops" / "__init__.py").read_text()
    for module, names in re.findall(r"^from (\S+) import (.+)$", imports, re.MULTILINE):
        yield from (f"{module}.{name}" for name in names.split(", "))


def on_files(files, config):
    """Adds reference.md, which is not in docs/ because it is unreadable without the generator."""
    parts = {
        "Operations": operations(),
        "Models and training": (f"transformer_kernels.{name}" for name in MODELS.split()),
        "Backends": (f"transformer_kernels.{name}" for name in BACKENDS.split()),
    }
    sections = (f"\n## {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) for title, names in parts.items())
    files.append(File.generated(config, "reference.md", content=INTRODUCTION + "\n".join(sections)))
    return files


def on_page_markdown(markdown, page, **_):
    """`[text](../path#part)` becomes "text (`path`)"; an error where the path does not exist."""

    def shown(found):
        path = (ROOT / "docs" / found["path"]).resolve().relative_to(ROOT)
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {path} does not exist")
        return found["text"] if str(path) in found["text"] else f"{found['text']} (`{path}`)"

    return re.sub(r"\[(?P<text>[^]]*)\]\((?P<path>\.\./[^)#]+)[^)]*\)", shown, markdown)
