"""A run's folder: whose it is, whether the run has finished, and what is written when it begins. Loads no torch.

Calls: cli.py, train.py, ops/launch.py, ops/rank.py, ops/status.py.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from datetime import datetime, timezone
from pathlib import Path

from graphcap import config as recipes
from graphcap.config import Recipe
from graphcap.errors import ConfigError
from graphcap.ops import blackbox, checkpoint, ending, faults, records

RESULT, LOG = "result.json", "run.log"
GONE_S = 2.0  # a folder that is away for so long was removed or renamed


def finished_result(recipe: Recipe) -> dict | None:
    """Check that the run's folder is this run's or free; returns the result if the run has finished. Writes nothing.

    A folder without a complete checkpoint holds nothing worth keeping: any recipe may begin there.
    Raises: ConfigError if the folder holds another recipe's run, naming the keys that differ, or files that are no run's.
    """
    folder, kept = recipe.folder, recipe.folder / "config.toml"
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir():
        raise _taken(above, "a file")
    if not kept.is_file():
        if (folder / ending.START).is_file():  # a start of this kind that ended before it could begin
            return None
        if folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise _taken(folder, "a folder with other files")
        return None
    if checkpoint.newest(folder / "checkpoints")[0] is None:
        return None
    recipes.check_resume(recipes.load_recipe(kept), recipe)
    try:
        document = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        return document if document["schedule"] == schedule_keys(recipe) else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "result",
            folder / RESULT,
            expected="the result of a finished run",
            got=f"{type(error).__name__}: {error}",
            fix="remove the file and give the same command again: it decodes once more",
        ) from error


def _taken(folder: Path, got: str) -> ConfigError:
    return ConfigError(
        "run's folder", folder, expected="a run of graphcap or nothing", got=got, fix="choose another run.name or run.out"
    )


def create(recipe: Recipe, *, shapes_json: str, environment: dict) -> None:
    """Write the resolved recipe, shapes and env.json into the run's folder; a result from before the schedule grew goes."""
    # First: it makes the folder a run's. Without what a shell put into a command of run.on_end.
    checkpoint.write_text(recipe.folder / "config.toml", ending.hidden(recipes.to_toml(recipe)))
    (recipe.folder / RESULT).unlink(missing_ok=True)
    checkpoint.write_text(recipe.folder / "shapes.json", shapes_json)
    checkpoint.write_json(recipe.folder / "env.json", environment)


def schedule_keys(recipe: Recipe) -> list:
    """The keys that may change between two starts and that the result depends on: with the same ones nothing is left to do."""
    evaluation = recipe.eval
    return [
        recipe.optimizer.epochs,
        recipe.optimizer.max_updates,
        evaluation.prompts,
        evaluation.max_new_tokens,
        evaluation.passes,
        evaluation.dtype,
        evaluation.temperature,
        evaluation.rule,
    ]


class Claim:
    """A run's folder that is this process's own until `close`, or until the process ends, however it ends.

    `start.json` says who works in it and how to go on. previous: the end.json of the start before, if there was one.
    """

    def __init__(self, recipe: Recipe, command: str, *, supervised: bool = True) -> None:
        """supervised: whether this process watches ranks. Raises: ConfigError if another process holds the folder, or if it
        cannot be made."""
        self.folder, self.supervised = recipe.folder, supervised
        self._made = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]  # innermost first
        self._lock = lock(recipe)
        self._missing_since = 0.0
        log = self.folder / LOG
        self._log_bytes = log.stat().st_size if log.exists() else 0
        start, self.previous = ending.read(self.folder, ending.START), ending.read(self.folder, ending.END)
        if self.previous is None and start is not None:
            self.previous = records.conclude(self.folder, start)  # killed with its supervisor, and nobody has asked since
        if self.previous is not None:
            self.note(f"before    {ending.headline(self.previous)}")
        self.begin(command)

    def note(self, line: str) -> None:
        """One more line in run.log, which loses only those of a start that was refused."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with contextlib.suppress(OSError), open(self.folder / LOG, "a", encoding="utf-8") as log:
            log.write(f"{now} {line}\n")

    def begin(self, command: str, *, restarts: int = 0) -> None:
        """A start: nothing of an earlier one may be taken for this one's. restarts: how many came before it.

        What the earlier one left is put aside, as `NAME.before`.
        """
        start, *others = self._records()
        _before(start).unlink(missing_ok=True)
        if start.exists():
            shutil.copyfile(start, _before(start))
        checkpoint.write_json(
            self.folder / ending.START,
            {
                "version": 1,
                "command": ending.hidden(command),
                "supervised": self.supervised,
                "restarts": restarts,
                **blackbox.identity(),
            },
        )
        for path in others:
            _before(path).unlink(missing_ok=True)
            if path.exists():
                path.replace(_before(path))

    def _records(self) -> list[Path]:
        """Where the records of a start lie, start.json first."""
        ranks = [path for path in self.folder.glob("rank-*") if path.is_dir()]
        names = (blackbox.FILE, faults.TRACEBACK, "stdout", "stderr")
        return [self.folder / ending.START, self.folder / ending.END, *(rank / name for rank in ranks for name in names)]

    def leave_nothing(self) -> bool:
        """For a start that was refused: the records before it stand again; of a run that never began nothing stays.

        False: a run that has begun, with no end before this one's.
        """
        if (self.folder / "config.toml").exists():
            if self.previous is not None:
                for path in reversed(self._records()):  # start.json last: until then this start says how it went
                    path.unlink(missing_ok=True)
                    if _before(path).exists():
                        _before(path).replace(path)
                if self._log_bytes:
                    os.truncate(self.folder / LOG, self._log_bytes)
                else:
                    (self.folder / LOG).unlink(missing_ok=True)
            return self.previous is not None
        for ranks in self.folder.glob("rank-*"):
            for path in ranks.iterdir():
                path.unlink()
            ranks.rmdir()
        for path in map(self.folder.joinpath, (ending.START, ending.END, LOG, ".lock")):
            path.unlink(missing_ok=True)
            _before(path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody has put something into it
            for folder in self._made:
                folder.rmdir()
        return True

    def check(self, *, at_once: bool = False) -> None:
        """Raises: ConfigError if the folder is no longer the one claimed: somebody removed, replaced or renamed it.

        What a network file system says for a moment, and any other refusal, is not that; at_once: nobody can wait and see.
        """
        try:
            there = os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.folder / ".lock"))
        except FileNotFoundError:
            there = False
        except OSError:
            return
        now = time.monotonic()
        self._missing_since = 0.0 if there else self._missing_since or now
        if there or (now - self._missing_since < GONE_S and not at_once):
            return
        raise ConfigError(
            "run's folder",
            self.folder,
            expected="the folder that this run began in",
            got="none, or another",
            cause="somebody removed or renamed it, so the run was ended",
            fix="put it back if it was renamed, then give the same command again",
        )

    def moved_to(self) -> Path | None:
        """Where the folder is now, if somebody has renamed it; None if it is gone."""
        try:
            lock = Path(os.readlink(f"/proc/self/fd/{self._lock.fileno()}"))
        except OSError:
            return None
        return lock.parent if lock.exists() else None

    def close(self) -> None:
        self._lock.close()


def _before(path: Path) -> Path:
    return path.with_name(f"{path.name}.before")


def is_claimed(folder: Path) -> bool:
    """Whether a process, in whatever container of this node, works in the run's folder now."""
    try:
        with open(folder / ".lock", encoding="utf-8") as held:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


def lock(recipe: Recipe):
    """Make the run's folder this process's own until the returned file is closed, or the process ends, however it ends.

    Raises: ConfigError if another process holds it, or if the folder cannot be made.
    """
    try:
        recipe.folder.mkdir(parents=True, exist_ok=True)
        held = open(recipe.folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - it stays open as long as the run
    except OSError as error:
        raise ConfigError(
            "run's folder", recipe.folder, expected="a folder that can be written", got=str(error), fix="choose another run.out"
        ) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held.close()
        raise ConfigError(
            "run's folder",
            recipe.folder,
            expected="a folder that no other process trains in",
            got="one that a process is training in",
            fix="wait for it, or choose another run.name",
        ) from error
    return held
