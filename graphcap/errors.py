"""The one way to fail: what was wrong, what was expected, what came, and what to do.

Every error a user can cause has the form `<thing> '<name>': expected …, got …; <cause>. Fix: <what to do>.` and ends the
process with exit code 2. A failure of CUDA is a `CaptureError` (exit code 1). Our own bugs are plain `assert`s.
"""

import contextlib
import re


@contextlib.contextmanager
def closing(thing):
    """Close `thing` at the end. An error on its way is never hidden: what closing says becomes a note on it."""
    try:
        yield thing
    except BaseException as error:
        try:
            thing.close()
        except Exception as failure:
            error.add_note(f"Closing failed too: {failure}")
        raise
    thing.close()


class GraphcapError(Exception):
    """Base of all errors of graphcap. `exit_code` is what the command line returns."""

    exit_code = 1
    again = True  # whether the same command may do better

    def __init__(self, thing: str, name: object, *, expected: str, got: str, fix: str, cause: str = "") -> None:
        """thing: what kind of thing is wrong ("recipe key"); name: which one; the rest fills the one sentence form."""
        self.thing, self.name, self.expected, self.got, self.cause, self.fix = thing, str(name), expected, got, cause, fix
        because = f"; {cause}" if cause else ""
        super().__init__(
            f"{thing} '{name}': expected {expected}, got {got}{because}. Fix: {fix}{'' if fix.endswith('?') else '.'}"
        )

    def __reduce__(self):
        """Errors travel between processes: their parts are keywords, which pickle does not know how to give again."""
        return _restored, (type(self), self.args, self.__dict__)

    @property
    def told(self) -> str:
        """The message and what was noted on it."""
        return "\n".join([str(self), *getattr(self, "__notes__", [])])


def _restored(kind: type, args: tuple, parts: dict) -> GraphcapError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(parts)
    return error


def in_the_one_form(error: BaseException, *, again: str) -> BaseException:
    """What a file system or the memory refused, in the one form; any other error as it is. again: what it then does."""
    if isinstance(error, OSError):
        return GraphcapError(
            "file",
            error.filename or "being written",
            expected="a file system that takes it",
            got=error.strerror or str(error),
            fix=f"free space or mend the rights, then give the same command again{again and f': it {again}'}",
        )
    # By torch's words, which differ by device: this loads no torch.
    refused = isinstance(error, RuntimeError) and re.search("can't allocate memory|out of memory", str(error))
    if not refused and not isinstance(error, MemoryError):
        return error
    asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
    return GraphcapError(
        "memory",
        "of this process",
        expected="room for the models and the largest row",
        got=f"none for {asked[1]} more" if asked else "none",
        fix="set shapes.row_length lower, end other programs, or use a machine with more memory",
    )


class UserError(GraphcapError, ValueError):
    """Something the user must mend: exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """A recipe, an override or a command line that cannot be used."""


class DataError(UserError):
    """A conversation, a file of conversations or a plan made from them that cannot be used."""


class ShapeError(UserError):
    """A tensor that does not fit its buffer, or a row that fits no bucket."""


class CheckpointError(UserError):
    """A checkpoint or drafter folder that is incomplete, damaged or belongs to something else."""


class CaptureError(GraphcapError, RuntimeError):
    """CUDA refused to capture or replay."""


class TrainingError(GraphcapError, RuntimeError):
    """Training cannot go on with these numbers: the same command would end the same way."""

    again = False
