"""A pool of activation buffers that outlives the step.

A buffer's first touch costs several times a later write, since the kernel maps and clears its
pages; so buffers are lent again instead of being freed.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import mpipar.nn.array as nn_array
from mpipar.nn.array import Array


class Workspace:
    """Lends arrays and takes them back.

    Not for use by several threads at once. An array that is never given back is simply freed.

    Attributes
    ----------
    n_allocations : int
        Arrays allocated so far; constant from the second step on when shapes do not change.
    n_bytes : int
        Bytes of those arrays, as far as the dtype tells its size.
    """

    def __init__(self) -> None:
        self.n_allocations = 0
        self.n_bytes = 0
        self._free: dict[tuple[Any, ...], list[Array]] = {}
        self._kept: dict[Hashable, Any] = {}
        self._lent: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()

    def take(self, like: Array, shape: tuple[int, ...]) -> Array:
        """Lend an array with undefined contents.

        Parameters
        ----------
        like : Array
            Gives library, dtype and device.
        shape : tuple of int
            The shape.

        Returns
        -------
        Array
            C-contiguous, to be handed back with `give`.
        """
        free = self._free.get((type(like), shape, str(like.dtype)))
        if free:
            array = free.pop()
        else:
            array = nn_array.empty_like(like, shape)
            self.n_allocations += 1
            self.n_bytes += math.prod(array.shape) * getattr(array.dtype, "itemsize", 0)
        self._lent[id(array)] = array
        return array

    @property
    def lent_bytes(self) -> int:
        """Bytes that are lent at this moment."""
        return sum(a.nbytes for a in self._lent.values())

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return a constant, made at the first call.

        Parameters
        ----------
        key : hashable
            Names it.
        make : callable
            Makes it.

        Returns
        -------
        object
            The same one for every call with this key.
        """
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def give(self, *arrays: Array | None) -> None:
        """Take lent arrays back; arrays that were not lent here are left alone.

        Parameters
        ----------
        *arrays : Array or None
            Arrays that nobody reads any more.
        """
        for array in arrays:
            if array is not None and self._lent.pop(id(array), None) is array:
                key = (type(array), tuple(array.shape), str(array.dtype))
                self._free.setdefault(key, []).append(array)
