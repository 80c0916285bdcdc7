"""Puts the recipes of the repository into the package, where `fedstill init` finds them."""

from pathlib import Path
from shutil import copyfile

from setuptools import setup
from setuptools.command.build_py import build_py


class WithRecipes(build_py):
    """Builds the package and copies every recipe into it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # there they are found where they lie
            return
        source = Path(__file__).parent / "recipes"
        for recipe in sorted(source.rglob("*.toml")):
            target = Path(self.build_lib) / "fedstill" / "recipes" / recipe.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            copyfile(recipe, target)


setup(cmdclass={"build_py": WithRecipes})
