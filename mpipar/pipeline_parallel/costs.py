"""What the actions of a pipeline cost: microseconds, transfers, memory; exact if given exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from mpipar.errors import NonFiniteValue, OutOfRange, ScheduleError
from mpipar.pipeline_parallel.graph import Times

Number: TypeAlias = int | float | Fraction
PerStage: TypeAlias = Number | Sequence[Number]

_COMPUTE = ("forward_us", "input_us", "weight_us")


@dataclass(frozen=True)
class Costs:
    """Times and memory of one microbatch, each one number or one per stage.

    Ints and Fractions stay exact through the simulation; one float makes all of it float64.
    The letters are Zero Bubble's (arXiv 2401.10241): B = I + W. For stages that are chunks of
    a rank's share (interleaved, ZB-V, DualPipeV) give the chunk's time, see `per_chunk`.

    Parameters
    ----------
    forward_us, input_us, weight_us : number or sequence
        F, I and W of each stage.
    backward_us : number or sequence, optional
        A full backward B; left out, I + W.
    pair_us : number, optional
        An overlapped pair of any two stages; left out, the sum of its two halves.
    latency_us, message_bytes : number or sequence
        Per boundary between stages s and s + 1 (one fewer than the stages): fixed delay, and
        size of a message in either direction. Nothing is charged between stages of one rank.
    bandwidth_bytes_per_us : number or sequence, optional
        Per boundary; left out, messages take their latency only.
    activation : number or sequence, optional
        What a stage holds for one microbatch from F on, in any unit; left out, its share of
        the rank, so that peaks count whole stages as in the papers.
    held_for_weight : number
        Fraction of `activation` that stays from I to W. Zero Bubble's transformer keeps 32 h of
        34 h + 5 a s (0.37 to 0.43 for its models); 1 is what holds for any layer.
    """

    forward_us: PerStage = 1
    input_us: PerStage = 1
    weight_us: PerStage = 1
    backward_us: PerStage | None = None
    pair_us: Number | None = None
    latency_us: PerStage = 0
    message_bytes: PerStage = 0
    bandwidth_bytes_per_us: PerStage | None = None
    activation: PerStage | None = None
    held_for_weight: Number = Fraction(1, 2)

    def __post_init__(self) -> None:
        for field in self.__dataclass_fields__:
            given = getattr(self, field)
            if given is None:
                continue
            if isinstance(given, Sequence | np.ndarray):
                given = tuple(given.tolist() if isinstance(given, np.ndarray) else given)
                object.__setattr__(self, field, given)
            values = given if isinstance(given, Sequence) else (given,)
            for value in values:
                if not math.isfinite(value):
                    raise NonFiniteValue(field, float(value))
                if value < 0 or (value == 0 and field == "bandwidth_bytes_per_us"):
                    raise OutOfRange(field, "0 or more", float(value))
        if self.held_for_weight > 1:
            raise OutOfRange("held_for_weight", "0..1", float(self.held_for_weight))

    def per_chunk(self, n_chunks: int) -> Costs:
        """Costs of a chunk when the stages given here are cut into equal chunks.

        Parameters
        ----------
        n_chunks : int
            Chunks per stage. Compute times are divided exactly; messages stay as they are.

        Returns
        -------
        Costs
            For the schedule of ``n_stages * n_chunks`` stages; needs one number for all stages.
        """
        if n_chunks == 1:
            return self
        share: dict[str, Any] = {}
        for field in (
            "forward_us",
            "input_us",
            "weight_us",
            "backward_us",
            "pair_us",
            "activation",
        ):
            value = getattr(self, field)
            if isinstance(value, Sequence):
                raise ScheduleError(f"{field} has one number per stage: give the chunks' own")
            if value is not None:
                share[field] = divide(value, n_chunks)
        return replace(self, **share)

    def with_activation(self, n_ranks: int, n_stages: int) -> Costs:
        """These costs with `activation` filled in where it was left out.

        Parameters
        ----------
        n_ranks, n_stages : int
            Sizes of the schedule.

        Returns
        -------
        Costs
            A stage's share of its rank, so that one whole rank's share counts 1.
        """
        if self.activation is not None:
            return self
        return replace(self, activation=divide(n_ranks, n_stages))

    def of_stages(self, field: str, n_stages: int) -> list[Number]:
        """One number per stage (or per boundary, for the transfers).

        Parameters
        ----------
        field : str
            Name of a field of this class that is set.
        n_stages : int
            Stages of the schedule.

        Returns
        -------
        list of number
            `n_stages` of them, or one fewer for a boundary.

        Raises
        ------
        ScheduleError
            If a sequence of another length was given.
        """
        boundary = field in ("latency_us", "message_bytes", "bandwidth_bytes_per_us")
        n = n_stages - boundary
        value = getattr(self, field)
        if not isinstance(value, Sequence):
            return [value] * n
        if len(value) != n:
            unit = "boundaries between stages" if boundary else "stages"
            raise ScheduleError(f"{field} has {len(value)} numbers for {n} {unit}; give 1 or {n}")
        return list(value)

    def full_backward(self, n_stages: int) -> list[Number]:
        """B of each stage.

        Parameters
        ----------
        n_stages : int
            Stages of the schedule.

        Returns
        -------
        list of number
            `backward_us`, or I + W.
        """
        if self.backward_us is not None:
            return self.of_stages("backward_us", n_stages)
        inputs = self.of_stages("input_us", n_stages)
        return [i + w for i, w in zip(inputs, self.of_stages("weight_us", n_stages), strict=True)]

    def transfers(self, n_stages: int) -> list[Number]:
        """Time of a message over each boundary.

        Parameters
        ----------
        n_stages : int
            Stages of the schedule.

        Returns
        -------
        list of number
            Latency plus bytes over bandwidth, `n_stages` - 1 of them.
        """
        latency = self.of_stages("latency_us", n_stages)
        if self.bandwidth_bytes_per_us is None:
            return latency
        size = self.of_stages("message_bytes", n_stages)
        speed = self.of_stages("bandwidth_bytes_per_us", n_stages)
        return [t + divide(n, v) for t, n, v in zip(latency, size, speed, strict=True)]


def divide(a: Number, b: Number) -> Number:
    """Quotient that stays exact for exact numbers.

    Parameters
    ----------
    a, b : number
        Dividend and divisor.

    Returns
    -------
    number
        An int where it is whole, a Fraction, or a float if either is one.
    """
    if isinstance(a, float) or isinstance(b, float):
        return float(a) / float(b)
    quotient = Fraction(a) / Fraction(b)
    return quotient.numerator if quotient.denominator == 1 else quotient


def to_ticks(groups: Sequence[Iterable[Number]], n_times: int) -> tuple[list[Times], int]:
    """Bring numbers to one array type in which sums are exact.

    Parameters
    ----------
    groups : sequence of iterable of number
        Groups of numbers that will be added to one another.
    n_times : int
        At most so many of them will be added up.

    Returns
    -------
    arrays : list of array
        One per group: float64 if any is a float, else whole ticks as int64 (as Python ints
        where a sum could overflow).
    ticks : int
        Ticks in one unit, 1 for floats.
    """
    lists = [list(group) for group in groups]
    numbers = [number for group in lists for number in group]
    if any(isinstance(number, float) for number in numbers):
        return [np.array([float(x) for x in group]) for group in lists], 1
    exact = [[Fraction(x) for x in group] for group in lists]
    ticks = math.lcm(*(x.denominator for group in exact for x in group))
    whole = [[int(x * ticks) for x in group] for group in exact]
    largest = max((abs(x) for group in whole for x in group), default=0)
    dtype = np.int64 if largest * (n_times + 1) < 2**62 else np.object_
    return [np.array(group, dtype=dtype) for group in whole], ticks


def from_ticks(value: Any, ticks: int) -> Number:
    """A number of ticks as a plain number.

    Parameters
    ----------
    value : NumPy or Python number
        Ticks.
    ticks : int
        Ticks in one unit.

    Returns
    -------
    number
        A float for floats, else an int where it is whole and a Fraction otherwise.
    """
    if isinstance(value, float | np.floating):
        return float(value)
    return divide(int(value), ticks)
