"""The error tree: everything mpipar raises on purpose.

::

    ParallelismError
    |-- EmptyInput           (ValueError)     nothing was given where at least one is needed
    |-- OutOfRange           (ValueError)     a value lies outside its range
    |   `-- CountOutOfRange                   the same for a whole number, such as a rank
    |-- NonFiniteValue       (ValueError)     NaN or infinity where a finite number is needed
    |-- Overflow             (OverflowError)  a result above 2**63 - 1
    |-- UnevenSplit          (ValueError)     an exact split leaves a remainder
    |-- RankMismatch         (ValueError)     values that must agree between ranks do not
    |-- InvalidPublicReport  (ValueError)     something unreviewed was about to be published
    |-- CollectiveMismatch   (ValueError)     ranks made different calls, or one call was wrong
    |-- CollectiveTimeout    (TimeoutError)   a deadline passed; the missing ranks are named
    |-- RankFailed           (RuntimeError)   another rank raised, left or died
    |-- LaunchError          (RuntimeError)   launcher and MPI library do not fit
    |-- UnsupportedArray     (TypeError)      an array that cannot be communicated as asked
    |-- ScheduleError        (ValueError)     a pipeline schedule that cannot run
    |-- LayoutError          (ValueError)     a mesh or sharding that cannot exist
    |-- RecipeError          (ValueError)     a recipe with an unknown key or a bad value
    |-- CheckpointError      (ValueError)     a checkpoint that is missing or does not fit
    |   `-- DamagedCheckpoint                 the same, cut short or altered
    `-- CacheError           (RuntimeError)   a cache operation that would lose or mix blocks

Each also derives from the builtin (in brackets) that a user would catch.
Messages say what was asked, the numbers, and the nearest valid choice.
"""

from __future__ import annotations


class ParallelismError(Exception):
    """Root of every error that mpipar raises on purpose."""


class _OperationError(ParallelismError):
    """An error that names the operation and what was wrong about it."""

    _phrase = ""

    def __init__(self, operation: str, details: str) -> None:
        self.operation = operation
        self.details = details
        super().__init__(f"{self._phrase} in {operation}: {details}")


class EmptyInput(_OperationError, ValueError):
    """Nothing was given where at least one is needed."""

    _phrase = "empty input"


class OutOfRange(ParallelismError, ValueError):
    """A value lies outside its range: fields `role`, `range` and `value`."""

    def __init__(self, role: str, range: str, value: float) -> None:
        self.role = role
        self.range = range
        self.value = value
        super().__init__(f"{role} must be in range {range}, got {value}")


class CountOutOfRange(OutOfRange):
    """A whole number lies outside its range."""


class NonFiniteValue(ParallelismError, ValueError):
    """NaN or infinity where a finite number is needed."""

    def __init__(self, role: str, value: float) -> None:
        self.role = role
        self.value = value
        super().__init__(f"{role} must be finite, got {value}")


class Overflow(_OperationError, OverflowError):
    """A result above 2**63 - 1."""

    _phrase = "overflow"


class UnevenSplit(_OperationError, ValueError):
    """An exact split leaves a remainder."""

    _phrase = "uneven split"


class RankMismatch(_OperationError, ValueError):
    """Values that must agree between ranks do not."""

    _phrase = "rank mismatch"


class InvalidPublicReport(_OperationError, ValueError):
    """Something that was not reviewed as public was about to be published."""

    _phrase = "invalid public report"


class CollectiveMismatch(ParallelismError, ValueError):
    """Ranks made different calls, or one of them made a wrong one."""


class CollectiveTimeout(ParallelismError, TimeoutError):
    """A deadline passed before every rank arrived."""


class RankFailed(ParallelismError, RuntimeError):
    """Another rank raised, left the program or died."""


class LaunchError(ParallelismError, RuntimeError):
    """The launcher and the MPI library do not fit."""


class UnsupportedArray(ParallelismError, TypeError):
    """An array that cannot be communicated or computed as asked."""


class ScheduleError(ParallelismError, ValueError):
    """A pipeline schedule that cannot run."""


class LayoutError(ParallelismError, ValueError):
    """A mesh or a sharding that cannot exist."""


class RecipeError(ParallelismError, ValueError):
    """A recipe with an unknown key or a value of the wrong kind."""


class CheckpointError(ParallelismError, ValueError):
    """A checkpoint that is missing, or does not fit."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is cut short or was altered."""


class CacheError(ParallelismError, RuntimeError):
    """A cache operation that would lose or mix blocks."""


def rebuild(name: str, message: str) -> ParallelismError:
    """Make an error of the tree again from its class name and message.

    Parameters
    ----------
    name : str
        Name of a class in this module; an unknown one gives `ParallelismError`.
    message : str
        The message as it was.

    Returns
    -------
    ParallelismError
        An error of that class, so that all ranks raise the one that a single rank found.
    """
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, ParallelismError)):
        kind = ParallelismError
    error: ParallelismError = kind.__new__(kind)
    Exception.__init__(error, message)
    return error
