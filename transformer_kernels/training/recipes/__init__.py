"""Recipes, one file each; `recipe.py` has the base class and the list."""

from transformer_kernels.training.recipe import (
    ENTRIES,
    Alignment,
    Classified,
    Recipe,
    Trained,
    Translated,
    find_recipe,
    make_config,
    recipes,
)

__all__ = [
    "ENTRIES",
    "Alignment",
    "Classified",
    "Recipe",
    "Trained",
    "Translated",
    "find_recipe",
    "make_config",
    "recipes",
]
