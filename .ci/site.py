"""Hooks of the site: API reference, training, examples and benchmarks as pages; links to other files as paths."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
MODELS = "patch unpatch compile accelerate graphed compare certify build bind load_pretrained export_pretrained"
TRAINING = "training.Trainer training.Result training.CharGPT training.CharGPTConfig training.Imdb training.ImdbConfig"
HUGGINGFACE = "huggingface.attention_forward huggingface.attention_mask"
PAGES = {"transformer_kernels/training/README.md": "training.md", "benchmarks/README.md": "benchmarks.md"}
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
        "Models": (f"transformer_kernels.{name}" for name in MODELS.split()),
        "Modules": (f"transformer_kernels.nn.{name}" for name in modules()),
        "Training": (f"transformer_kernels.{name}" for name in TRAINING.split()),
        "Transformers": (f"transformer_kernels.{name}" for name in HUGGINGFACE.split()),
        "Backends": (f"transformer_kernels.{name}" for name in BACKENDS.split()),
    }
    sections = (f"\n## {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) for title, names in parts.items())
    files.append(File.generated(config, "reference.md", content=INTRODUCTION + "\n".join(sections)))
    for path, name in PAGES.items():
        files.append(File.generated(config, name, content=moved(path)))
    files.append(File.generated(config, "examples.md", content=examples()))
    return files


def modules():
    """The public names of transformer_kernels.nn."""
    source = (ROOT / "transformer_kernels" / "nn.py").read_text()
    return re.findall(r'"(\w+)"', re.search(r"__all__ = \[(.*?)\]", source, re.DOTALL)[1])


def examples():
    """The examples as one page, each with the first sentence of its docstring."""
    parts = ["# Examples\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text("utf-8")
        title = source.split('"""')[1].partition("\n")[0].rstrip(".:")
        parts.append(f"## {title}\n\n`examples/{path.name}`\n\n```python\n{source}```\n")
    return "\n".join(parts)


def moved(path):
    """A page from elsewhere in the repository: its links are those of a page in docs/."""
    source = ROOT / path

    def link(found):
        target, anchor = found["path"], found["anchor"] or ""
        if target.startswith(("http", "#")) or not target:
            return found[0]
        inside = (source.parent / target).resolve().relative_to(ROOT)
        if inside.parts[0] == "docs" and len(inside.parts) == 2:
            return f"[{found['text']}]({inside.name}{anchor})"
        return f"[{found['text']}](../{inside}{anchor})"

    return re.sub(r"!?\[(?P<text>[^]]*)\]\((?P<path>[^)#]*)(?P<anchor>#[^)]*)?\)", link, source.read_text("utf-8"))


def on_page_markdown(markdown, page, **_):
    """`[text](../path#part)` becomes "text (`path`)"; an error where the path does not exist."""

    def shown(found):
        path = (ROOT / "docs" / found["path"]).resolve().relative_to(ROOT)
        if str(path) in PAGES:
            return f"[{found['text']}]({PAGES[str(path)]}{found['anchor'] or ''})"
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {path} does not exist")
        return found["text"] if str(path) in found["text"] else f"{found['text']} (`{path}`)"

    return re.sub(r"\[(?P<text>[^]]*)\]\((?P<path>\.\./[^)#]+)(?P<anchor>#[^)]*)?\)", shown, markdown)
