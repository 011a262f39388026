"""Shared memory on huge pages, where Linux gives them to a process that asks.

A shared mapping lies on pages of 4 KiB unless the machine's owner has set ``shmem_enabled``; then
sums over large arrays walk page tables, twice over in a virtual machine. ``MADV_COLLAPSE`` (Linux
6.1) needs no such setting and no privilege, but a mapping whose address and offset in the file
agree to the size of a huge page: hence the aligned mapping here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 4096
_POPULATE_WRITE, _COLLAPSE = 23, 25  # Linux 5.14, 6.1
_LARGEST = 64 * 2**20  # on machines with base pages of 64 KiB a huge one has 512 MiB
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def huge_page() -> int:
    """Bytes of a huge page; 0 where there are none, or where ``MPIPAR_HUGE_PAGES=0`` says so.

    Returns
    -------
    int
        A power of two.
    """
    try:
        size = int(_SETTING.read_text())
    except (OSError, ValueError):
        return 0
    return size if size <= _LARGEST and os.environ.get("MPIPAR_HUGE_PAGES") != "0" else 0


def map_file(file: int, n_bytes: int) -> tuple[object, Any]:
    """A shared mapping of a file, at an address that allows huge pages.

    Parameters
    ----------
    file : int
        Its descriptor.
    n_bytes : int
        Size of the mapping.

    Returns
    -------
    (object, buffer)
        What keeps the mapping, and its memory.

    Raises
    ------
    OSError
        If it cannot be mapped.
    """
    size, system = huge_page(), _functions()
    if not size or system is None:
        plain = mmap.mmap(file, n_bytes)
        return plain, plain
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = mmap.mmap(-1, n_bytes + size, flags=flags, prot=0)  # the mapping replaces a part of it
    start = np.frombuffer(room, np.uint8).__array_interface__["data"][0]
    start += -start % size
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
    if system[0](start, n_bytes, protection, flags, file, 0) != start:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return room, (ctypes.c_char * n_bytes).from_address(start)


def populate(address: int, n_bytes: int) -> bool:
    """Enter all pages of a part into this process's table at once.

    Parameters
    ----------
    address, n_bytes : int
        Of the part.

    Returns
    -------
    bool
        Whether the system did.
    """
    system = _functions()
    return system is not None and system[1](address, n_bytes, _POPULATE_WRITE) == 0


def collapse(address: int, n_bytes: int) -> bool:
    """Put a part, of which each huge page has one page, on huge pages.

    Parameters
    ----------
    address, n_bytes : int
        Of the part, whole huge pages.

    Returns
    -------
    bool
        Whether all of it lies on them now.
    """
    system = _functions()
    return system is not None and system[1](address, n_bytes, _COLLAPSE) == 0


_FIXED = 0x10
_found: list[tuple[Callable[..., int], Callable[..., int]] | None] = []


def _functions() -> tuple[Callable[..., int], Callable[..., int]] | None:
    """``mmap`` and ``madvise`` of the C library, on Linux."""
    if not _found:
        try:
            library = ctypes.CDLL(None, use_errno=True)
            map_, advise = library.mmap, library.madvise
        except (OSError, AttributeError):
            _found.append(None)
            return None
        map_.restype = ctypes.c_void_p
        map_.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        _found.append((map_, advise))
    return _found[0]
