"""The one mechanism behind every typed quantity: checked, ordered, immutable, never mixed.

A quantity is declared by a class statement (`mpipar.units.counts` is the table). The keywords say
which numbers it takes and how it prints; the generic bases say what it divides into, so that a
type checker sees the result of each operation. Refusals are the same everywhere: zero where at
least one is needed is `EmptyInput`, a number of the wrong sign or kind `CountOutOfRange` or
`OutOfRange`, NaN and infinity `NonFiniteValue`, more than ``2**63 - 1`` `Overflow`.
"""

from __future__ import annotations

import math
from numbers import Integral
from numbers import Real as AnyReal
from typing import Any, ClassVar, NoReturn, Self

from mpipar.errors import CountOutOfRange, EmptyInput, NonFiniteValue, OutOfRange, Overflow

LARGEST = 2**63 - 1


class Quantity:
    """A number of one kind: compared and combined with its own kind only.

    Class keywords: `zero` and `negative` say whether such numbers are valid, `unit` is printed
    after the number, `spec` is how the number is printed.
    """

    role: ClassVar[str] = "quantity"
    _zero: ClassVar[bool] = False
    _negative: ClassVar[bool] = False
    _unit: ClassVar[str] = ""
    _spec: ClassVar[str] = ""
    _number: Any

    def __init_subclass__(
        cls,
        *,
        zero: bool | None = None,
        negative: bool | None = None,
        unit: str | None = None,
        spec: str | None = None,
    ) -> None:
        super().__init_subclass__()
        cls.role = "".join(f" {c.lower()}" if c.isupper() else c for c in cls.__name__).strip()
        given = {"_zero": zero, "_negative": negative, "_unit": unit, "_spec": spec}
        for name, value in given.items():
            if value is not None:
                setattr(cls, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a {self.role} is immutable; make a new {type(self).__name__}")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    @classmethod
    def _range(cls) -> str:
        if issubclass(cls, Count):
            return f"of whole numbers from {0 if cls._zero else 1}"
        least = "" if cls._negative else " from 0" if cls._zero else " above 0"
        return f"of real numbers{least}"

    def _settle(self, number: float) -> None:
        """Keep `number` once its sign is one that this kind takes."""
        if number == 0 and not self._zero:
            raise EmptyInput(self.role, f"got {number}, outside the range {self._range()}")
        if number < 0 and not self._negative:
            raise self._refusal(number)
        object.__setattr__(self, "_number", number)

    def _refusal(self, value: object) -> OutOfRange:
        error = CountOutOfRange if isinstance(self, Count) else OutOfRange
        is_number = type(value) is int or (type(value) is float and error is OutOfRange)
        wrong = "" if is_number else f" (not {type(value).__name__})"
        return error(self.role, self._range() + wrong, value)  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and bool(self._number == other._number)

    def __lt__(self, other: Self) -> bool:
        return self._number < other._number if type(self) is type(other) else NotImplemented

    def __le__(self, other: Self) -> bool:
        return self._number <= other._number if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self), self._number))

    def __bool__(self) -> bool:
        return bool(self._number != 0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._number!r})"

    def __str__(self) -> str:
        return f"{self._number:{self._spec}} {self._unit}".rstrip()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __reduce__(self) -> tuple[type[Self], tuple[Any]]:
        return type(self), (self._number,)


class Count(Quantity):
    """A whole number from 1, or from 0 where the kind allows it, up to ``2**63 - 1``.

    Parameters
    ----------
    value : int
        A Python or NumPy whole number (no bool, no float), or a quantity of this same kind.
        Another kind is refused: ``int(other)`` says that the change of kind is meant.

    Raises
    ------
    EmptyInput
        For zero where at least one is needed.
    CountOutOfRange
        For a negative number, or a value that is no whole number.
    Overflow
        Above ``2**63 - 1``.
    """

    _number: int

    def __init__(self, value: int | Self) -> None:
        plain: object = value._number if type(value) is type(self) else value
        if isinstance(plain, bool) or not isinstance(plain, Integral):
            raise self._refusal(plain)
        number = int(plain)
        if number > LARGEST:
            raise Overflow(self.role, f"{number} is above 2**63 - 1 ({LARGEST})")
        self._settle(number)

    def __int__(self) -> int:
        return self._number

    def __index__(self) -> int:
        return self._number


class Measure(Quantity, spec=".6g"):
    """A finite real number, held in double precision.

    Parameters
    ----------
    value : float
        A Python or NumPy real number (no bool), or a quantity of this same kind.

    Raises
    ------
    EmptyInput
        For zero where the kind needs more.
    OutOfRange
        For a number of the wrong sign, or a value that is no real number.
    NonFiniteValue
        For NaN and infinity.
    Overflow
        For a whole number that double precision cannot hold.
    """

    _number: float

    def __init__(self, value: float | Self) -> None:
        plain: object = value._number if type(value) is type(self) else value
        if isinstance(plain, bool) or not isinstance(plain, AnyReal):
            raise self._refusal(plain)
        try:
            number = float(plain)
        except OverflowError:
            raise Overflow(self.role, "too large for double precision") from None
        if not math.isfinite(number):
            raise NonFiniteValue(self.role, number)
        self._settle(number)

    def __float__(self) -> float:
        return self._number


class Summable(Quantity):
    """A kind whose numbers add up to the same kind."""

    def __add__(self, other: Self) -> Self:
        if type(self) is not type(other):
            return NotImplemented
        return type(self)(self._number + other._number)  # type: ignore[call-arg]


def hold(owner: object, **kinds: type[Any]) -> None:
    """Give fields of a frozen dataclass the kinds that they are declared with.

    Parameters
    ----------
    owner : object
        The dataclass instance, inside its ``__post_init__``.
    **kinds : type
        Field name and kind: a plain number becomes that kind, another kind is refused.
    """
    for name, kind in kinds.items():
        object.__setattr__(owner, name, kind(getattr(owner, name)))
