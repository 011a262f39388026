"""The error tree: its shape, its messages, and rebuilding an error on another rank."""

from __future__ import annotations

import re

import pytest

from mpipar import errors
from mpipar.errors import (
    CacheError,
    CollectiveTimeout,
    CountOutOfRange,
    EmptyInput,
    InvalidPublicReport,
    NonFiniteValue,
    OutOfRange,
    Overflow,
    ParallelismError,
    RankMismatch,
    UnevenSplit,
)

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ParallelismError) and kind.__name__[0] != "_"
]


def test_the_drawn_tree_is_the_implemented_one_in_the_same_order():
    drawn = re.findall(r"[|`]-- (\w+)(?: +\((\w+)\))?", errors.__doc__ or "")
    assert [name for name, _ in drawn] == [k.__name__ for k in KINDS[1:]]
    for name, builtin in drawn:
        if builtin:
            assert issubclass(getattr(errors, name), getattr(__import__("builtins"), builtin))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EmptyInput("batch", "got 0"), "empty input in batch: got 0"),
        (Overflow("bytes", "too many"), "overflow in bytes: too many"),
        (UnevenSplit("a / b", "10 / 4"), "uneven split in a / b: 10 / 4"),
        (RankMismatch("plan", "2 and 3"), "rank mismatch in plan: 2 and 3"),
        (InvalidPublicReport("r", "private"), "invalid public report in r: private"),
        (OutOfRange("loss", "0..1", 1.5), "loss must be in range 0..1, got 1.5"),
        (CountOutOfRange("rank", "0..2", 2), "rank must be in range 0..2, got 2"),
        (NonFiniteValue("loss", float("nan")), "loss must be finite, got nan"),
    ],
)
def test_founding_messages(error, message):
    assert str(error) == message
    with pytest.raises(ParallelismError):
        raise error


def test_fields_stay_readable():
    assert (EmptyInput("op", "why").operation, EmptyInput("op", "why").details) == ("op", "why")
    error = CountOutOfRange("rank", "0..2", 5)
    assert (error.role, error.range, error.value) == ("rank", "0..2", 5)
    assert (NonFiniteValue("loss", 2.0).role, NonFiniteValue("loss", 2.0).value) == ("loss", 2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_rebuild_gives_the_same_class_and_message(kind):
    again = errors.rebuild(kind.__name__, "what happened")
    assert type(again) is kind
    assert str(again) == "what happened"


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "annotations", "rebuild", "", "ValueError"])
def test_rebuild_of_a_stranger_gives_the_root(name):
    assert type(errors.rebuild(name, "m")) is ParallelismError


def test_users_catch_the_builtin():
    assert issubclass(CollectiveTimeout, TimeoutError)
    assert issubclass(CacheError, RuntimeError)
