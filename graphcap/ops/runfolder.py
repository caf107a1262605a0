"""A run's folder: whose it is, whether the run has finished, and what is written when it begins. Loads no torch.

Calls: cli.py, train.py.
"""

import json

from graphcap import config as recipes
from graphcap.config import Recipe
from graphcap.errors import ConfigError
from graphcap.ops import checkpoint

RESULT = "result.json"


def finished_result(recipe: Recipe) -> dict | None:
    """Check that the run's folder is this run's or free; returns the result if the run has finished. Writes nothing.

    Raises: ConfigError if the folder belongs to another recipe, naming the keys that differ.
    """
    folder = recipe.folder
    kept = folder / "config.toml"
    if kept.is_file():
        recipes.check_resume(recipes.load_recipe(kept), recipe)
        result = folder / RESULT
        if result.is_file():
            document = json.loads(result.read_text(encoding="utf-8"))
            if document["schedule"] == schedule_keys(recipe):
                return document
    elif folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            "run's folder",
            folder,
            expected="a run of graphcap or nothing",
            got="a folder with other files",
            fix="choose another run.name or run.out",
        )
    return None


def create(recipe: Recipe, *, shapes_json: str, environment: dict) -> None:
    """Make the run's folder with its resolved recipe, shapes and env.json; a result from before the schedule grew goes."""
    recipe.folder.mkdir(parents=True, exist_ok=True)
    (recipe.folder / RESULT).unlink(missing_ok=True)
    checkpoint.write_text(recipe.folder / "shapes.json", shapes_json)
    checkpoint.write_json(recipe.folder / "env.json", environment)
    checkpoint.write_text(recipe.folder / "config.toml", recipes.to_toml(recipe))


def schedule_keys(recipe: Recipe) -> list[int]:
    """The keys that may grow: with the same values a finished run has nothing left to do."""
    return [recipe.optimizer.epochs, recipe.optimizer.max_updates]
