"""Kinds of options that several verbs have; what is wrong is said before any work is done."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path


def positive(text: str) -> int:
    """A whole number of at least 1.

    Parameters
    ----------
    text : str
        As typed.

    Returns
    -------
    int
        The number.

    Raises
    ------
    argparse.ArgumentTypeError
        For anything else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)


def at_most(limit: int) -> Callable[[str], int]:
    """A whole number from 1 up to a limit.

    Parameters
    ----------
    limit : int
        The largest.

    Returns
    -------
    callable
        An argument's type.
    """

    def number(text: str) -> int:
        value = positive(text)
        if value > limit:
            raise argparse.ArgumentTypeError(f"{value} is too large: {limit} at most")
        return value

    return number


def one_of(*names: str) -> Callable[[str], str]:
    """One of some names; a wrong one is answered with the nearest.

    Parameters
    ----------
    *names : str
        What there is.

    Returns
    -------
    callable
        An argument's type.
    """

    def name(text: str) -> str:
        if text in names:
            return text
        near = get_close_matches(text, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        raise argparse.ArgumentTypeError(f"{text!r} is unknown; {hint}")

    return name


def new_file(*endings: str) -> Callable[[str], str]:
    """The path of a file that is to be written.

    Parameters
    ----------
    *endings : str
        Without dot; any will do if none is given.

    Returns
    -------
    callable
        An argument's type; the file may be there, and is replaced.
    """

    def file(text: str) -> str:
        path = Path(text)
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {path.parent}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is a folder; a file is needed")
        if endings and path.suffix[1:] not in endings:
            raise argparse.ArgumentTypeError(f"{text!r} must end in .{' or .'.join(endings)}")
        return text

    return file


PICTURE = ("png", "svg", "pdf")
"""Endings of pictures."""
