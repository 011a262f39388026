"""The operators of a lazy array, element by element."""

from __future__ import annotations

from typing import Any, Self


class Arithmetic:
    """Operators written once over two functions."""

    def _unary(self, name: str) -> Self:
        raise NotImplementedError

    def _binary(self, name: str, other: Any, swapped: bool = False) -> Self:
        raise NotImplementedError

    def __add__(self, other: Any) -> Self:
        return self._binary("add", other)

    def __radd__(self, other: Any) -> Self:
        return self._binary("add", other, True)

    def __sub__(self, other: Any) -> Self:
        return self._binary("subtract", other)

    def __rsub__(self, other: Any) -> Self:
        return self._binary("subtract", other, True)

    def __mul__(self, other: Any) -> Self:
        return self._binary("multiply", other)

    def __rmul__(self, other: Any) -> Self:
        return self._binary("multiply", other, True)

    def __truediv__(self, other: Any) -> Self:
        return self._binary("divide", other)

    def __rtruediv__(self, other: Any) -> Self:
        return self._binary("divide", other, True)

    def __neg__(self) -> Self:
        return self._unary("negative")

    def maximum(self, other: Any) -> Self:
        """The larger of two values, element by element.

        Parameters
        ----------
        other : LazyArray or number
            On the same device.

        Returns
        -------
        LazyArray
            NaN where either is NaN.
        """
        return self._binary("maximum", other)

    def exp(self) -> Self:
        """The exponential, element by element.

        Returns
        -------
        LazyArray
            Of the same shape.
        """
        return self._unary("exp")

    def tanh(self) -> Self:
        """The hyperbolic tangent, element by element.

        Returns
        -------
        LazyArray
            Of the same shape.
        """
        return self._unary("tanh")
