"""The pure half of data parallelism: which gradients travel together, in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mpipar.errors import CountOutOfRange


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced by one call.

    Parameters
    ----------
    dtype : str
        Name of their common element type.
    names : tuple of str
        Parameters, in the order in which a backward pass produces them.
    offsets : tuple of int
        First element of each one in the flat buffer.
    size : int
        Elements of the buffer.
    """

    dtype: str
    names: tuple[str, ...]
    offsets: tuple[int, ...]
    size: int


def plan_buckets(
    parameters: Iterable[tuple[str, tuple[int, ...], str, int]], bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Cut parameters into buckets, last parameter first.

    Parameters
    ----------
    parameters : iterable of (name, shape, dtype name, bytes per element)
        In forward order, equal on every rank; the backward pass yields them from the end.
    bucket_bytes : int
        A bucket is closed once it holds this much; a parameter is never cut.

    Returns
    -------
    tuple of Bucket
        In the order in which they are reduced on every rank.
    """
    if bucket_bytes < 1:
        raise CountOutOfRange("bucket_bytes", "1 or more", bucket_bytes)
    done: list[Bucket] = []
    names: list[str] = []
    offsets: list[int] = []
    size, current = 0, ("", 0)

    def close() -> None:
        nonlocal size
        if names:
            done.append(Bucket(current[0], tuple(names), tuple(offsets), size))
        names.clear()
        offsets.clear()
        size = 0

    for name, shape, dtype, itemsize in reversed(list(parameters)):
        if (dtype, itemsize) != current or size * itemsize >= bucket_bytes:
            close()
            current = (dtype, itemsize)
        names.append(name)
        offsets.append(size)
        size += math.prod(shape)
    close()
    return tuple(done)
