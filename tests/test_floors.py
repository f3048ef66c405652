"""A module imports only from floors below its own: the list of floors, checked against the imports."""

import ast
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]

FLOORS = (
    ("__main__",),
    ("cli",),
    ("visualization",),
    ("__init__", "kernel_layers", "training"),
    ("info",),
    ("verification",),
    ("patching", "pretrained"),
    ("nn", "huggingface", "_bind"),
    ("ops", "graphs"),
    ("backends", "_version", "_interruption"),
)
"""The modules of transformer_kernels, top floor first."""

MAX_ARROWS = 47

TRAINING_FLOORS = (
    ("__init__", "demo", "report", "speedrun"),
    ("recipes",),
    ("loop",),
    ("checkpoint",),
    ("recipe",),
    ("data", "decoding", "pretrained_commands"),
    ("config", "distributed", "step"),
    ("_optional", "blocks", "heartbeat"),
)
"""The modules of transformer_kernels.training, top floor first."""

REFERENCE_FLOORS = (
    ("__init__",),
    ("deepseek", "encoder", "swin", "translator"),
    ("bahdanau", "bert", "gpt", "skip_gram", "vit"),
    ("layers",),
    ("cache", "ops", "windows"),
    ("bpe", "config", "positions"),
)
"""The modules of python_ref, top floor first."""


def imported_names(path, package):
    """Modules of `package` that a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == package:
                yield from [alias.name for alias in node.names]
            elif node.module.startswith(f"{package}."):
                yield node.module[len(package) + 1 :].split(".")[0]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if f"{alias.name}.".startswith(f"{package}."):
                    yield alias.name[len(package) + 1 :].split(".")[0] or "__init__"


def arrows(package):
    """Pairs (importing, imported) of modules (top-level files and folders)."""
    root = CHECKOUT / package.replace(".", "/")
    modules = {path.stem for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    found = set()
    for path in sorted(root.rglob("*.py")):
        own = path.relative_to(root).parts[0].removesuffix(".py")
        for name in imported_names(path, package):
            found.add((own, name if name in modules else "__init__"))
    return {(own, name) for own, name in found if own != name}


def check(package, floors):
    level = {module: number for number, modules in enumerate(reversed(floors)) for module in modules}
    found = arrows(package)
    assert {module for arrow in found for module in arrow} <= level.keys(), "a module has no floor: add it to the list"
    wrong = sorted(f"{own} imports {name}" for own, name in found if level[name] >= level[own])
    assert not wrong, wrong


def test_imports_go_down_only():
    check("transformer_kernels", FLOORS)


def test_imports_within_training_go_down_only():
    check("transformer_kernels.training", TRAINING_FLOORS)


def test_imports_of_the_reference_go_down_only():
    check("python_ref", REFERENCE_FLOORS)


def test_the_number_of_dependencies_does_not_grow():
    assert len(arrows("transformer_kernels")) <= MAX_ARROWS


def test_the_package_without_its_models_imports_nothing_of_the_reference():
    for folder in ("backends", "graphs", "ops"):
        for path in (CHECKOUT / "transformer_kernels" / folder).rglob("*.py"):
            assert not list(imported_names(path, "python_ref")), path
