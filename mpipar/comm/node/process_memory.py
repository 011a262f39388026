"""Single copies between the private memories of two processes, through the kernel (Linux).

Security modules and container filters often forbid it, so it is probed before it is used.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.comm.call import Array
from mpipar.errors import RankFailed


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_Copy = Callable[..., int]


def _functions() -> tuple[_Copy, _Copy] | None:
    try:
        library = ctypes.CDLL(None, use_errno=True)
        functions = library.process_vm_readv, library.process_vm_writev
    except (OSError, AttributeError):
        return None
    for function in functions:
        function.restype = ctypes.c_ssize_t
        function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p,
                             ctypes.c_ulong, ctypes.c_ulong]  # fmt: skip
    return functions


_found = _functions()


class Far:
    """A flat array in the private memory of another process of this user.

    Parameters
    ----------
    pid : int
        The process.
    address : int
        Where the array begins there.
    dtype : dtype
        Element type.
    """

    __slots__ = ("address", "itemsize", "pid")

    def __init__(self, pid: int, address: int, dtype: np.dtype[Any]) -> None:
        self.pid, self.address, self.itemsize = pid, address, dtype.itemsize

    def read(self, part: slice, out: Array) -> Array:
        """Copy a part into `out` (contiguous) and return it."""
        _copy(0, self.pid, self.address + part.start * self.itemsize, out)
        return out

    def write(self, part: slice, data: Array) -> None:
        """Copy `data` (contiguous) over a part."""
        _copy(1, self.pid, self.address + part.start * self.itemsize, data)


def _copy(which: int, pid: int, remote: int, local: Array) -> None:
    if _found is None:
        raise RankFailed("this system has no process_vm_readv")
    start, n_bytes, done = local.__array_interface__["data"][0], local.nbytes, 0
    while done < n_bytes:
        here = _Iovec(start + done, n_bytes - done)
        there = _Iovec(remote + done, n_bytes - done)
        got = _found[which](pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            reason = os.strerror(ctypes.get_errno())
            raise RankFailed(f"copy of {n_bytes} bytes from or to process {pid}: {reason}")
        done += got


def probe(pid: int, address: int, expected: int) -> bool:
    """Whether a word of another process can be read and written.

    Parameters
    ----------
    pid, address : int
        Where the word is.
    expected : int
        Its value, which is written back.

    Returns
    -------
    bool
        False where the kernel refuses, or shows something else.
    """
    word = np.zeros(1, np.int64)
    far = Far(pid, address, word.dtype)
    try:
        far.read(slice(0, 1), word)
        if int(word[0]) != expected:
            return False
        far.write(slice(0, 1), word)
    except RankFailed:
        return False
    return True
