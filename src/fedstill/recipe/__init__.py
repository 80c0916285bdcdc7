"""Recipes: TOML files read, changed, checked and turned into objects.

A recipe is one TOML file with tables `run`, `data`, `models`, `federation`, `method`, `engine`
and, for people, `about` and `reported`. `[[method]]` may stand several times. A table `quick` holds
changes that make a small variant of the recipe.
"""

from fedstill.recipe.check import checked, chosen
from fedstill.recipe.read import overridden, quickened, read_recipe
from fedstill.recipe.tables import Recipe

__all__ = ["Recipe", "checked", "chosen", "overridden", "quickened", "read_recipe"]
