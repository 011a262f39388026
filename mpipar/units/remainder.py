"""The one place where remainders are decided: exact, spread, pad.

*Exact* refuses what does not divide, *spread* lets the first parts take one more, *pad* rounds
up. "The last part takes the rest" exists for interchange with other libraries and by name only.
"""

from __future__ import annotations

from mpipar.errors import CountOutOfRange, UnevenSplit


def _check(total: int, n_parts: int) -> None:
    if n_parts < 1:
        raise CountOutOfRange("number of parts", "1 or more", n_parts)
    if total < 0:
        raise CountOutOfRange("total to split", "0 or more", total)


def divisors(total: int) -> tuple[int, ...]:
    """All divisors of a positive number, ascending.

    Parameters
    ----------
    total : int
        A number of at least 1.

    Returns
    -------
    tuple of int
        Every divisor, from 1 to `total`.
    """
    low = [d for d in range(1, int(total**0.5) + 1) if total % d == 0]
    return tuple(sorted({*low, *(total // d for d in low)}))


def exact_size(total: int, n_parts: int, what: str = "total", over: str = "parts") -> int:
    """Size of each of `n_parts` equal parts, or a refusal that names what would do.

    Parameters
    ----------
    total : int
        What is split.
    n_parts : int
        Number of parts.
    what, over : str
        Names of the two numbers in the message.

    Returns
    -------
    int
        ``total // n_parts``.

    Raises
    ------
    UnevenSplit
        If a remainder is left; the message names the nearest numbers of parts and totals.
    """
    _check(total, n_parts)
    if total % n_parts:
        near = [d for d in divisors(total) if d < n_parts][-1:]
        near += [d for d in divisors(total) if d > n_parts][:1]
        lower = total - total % n_parts
        totals = " or ".join(str(t) for t in (lower, lower + n_parts) if t > 0)
        raise UnevenSplit(
            f"{what} / {over}",
            f"{what}={total} cannot be split exactly over {over}={n_parts}; "
            f"{over}={' or '.join(map(str, near))} would do, or {what}={totals}",
        )
    return total // n_parts


def spread_sizes(total: int, n_parts: int) -> tuple[int, ...]:
    """Sizes of `n_parts` parts where the first ones take one more.

    Parameters
    ----------
    total : int
        What is split, 0 or more.
    n_parts : int
        Number of parts, 1 or more; parts beyond `total` are empty.

    Returns
    -------
    tuple of int
        `n_parts` sizes that differ by at most one and sum to `total`.
    """
    _check(total, n_parts)
    size, rest = divmod(total, n_parts)
    return (size + 1,) * rest + (size,) * (n_parts - rest)


def spread_range(total: int, n_parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` under `spread_sizes`.

    Parameters
    ----------
    total, n_parts : int
        As in `spread_sizes`.
    index : int
        Which part, from 0.

    Returns
    -------
    tuple of int
        Half-open range ``(start, stop)``.
    """
    _check(total, n_parts)
    if not 0 <= index < n_parts:
        raise CountOutOfRange("part index", f"0..{n_parts}", index)
    size, rest = divmod(total, n_parts)
    start = index * size + min(index, rest)
    return start, start + size + (index < rest)


def padded_size(total: int, n_parts: int) -> int:
    """The smallest multiple of `n_parts` that is at least `total`.

    Parameters
    ----------
    total, n_parts : int
        As in `spread_sizes`.

    Returns
    -------
    int
        The padded total.
    """
    _check(total, n_parts)
    return -(-total // n_parts) * n_parts


def last_takes_rest_range(total: int, n_parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` when the last part takes the remainder.

    Parameters
    ----------
    total, n_parts : int
        As in `spread_sizes`.
    index : int
        Which part, from 0.

    Returns
    -------
    tuple of int
        Half-open range ``(start, stop)``.
    """
    _check(total, n_parts)
    if not 0 <= index < n_parts:
        raise CountOutOfRange("part index", f"0..{n_parts}", index)
    size = total // n_parts
    return index * size, total if index == n_parts - 1 else (index + 1) * size
