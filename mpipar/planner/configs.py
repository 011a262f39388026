"""Many configurations as one value: an array a field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import permutations
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mpipar.errors import CountOutOfRange, UnevenSplit

Ints = NDArray[np.int64]

NONE, SELECTIVE, FULL = 0, 1, 2
RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("1f1b", "gpipe", "zb-h1")
GPIPE, ZB_H1 = 1, 2
AXES = ("pp", "dp", "cp", "tp")
ORDERS = tuple(permutations(AXES))
"""Orders of the mesh axes from outermost to innermost; the first is the default."""


@dataclass(frozen=True)
class Configs:
    """Arrays of configurations, all of one length; scalars are arrays of length 1.

    Parameters
    ----------
    tp, pp, dp, cp, ep : array of int
        Degrees; `ep` divides dp x cp.
    micro : array of int
        Rows of a microbatch.
    n_micro : array of int
        Microbatches of a step on one replica.
    chunks : array of int
        Chunks of layers a stage holds: more than 1 is interleaved 1F1B.
    recompute : array of int
        Index into `RECOMPUTE`.
    zero : array of int
        ZeRO stage.
    sp : array of bool
        Sequence parallelism.
    schedule : array of int
        Index into `SCHEDULES`.
    order : array of int
        Index into `ORDERS`.
    """

    tp: Ints
    pp: Ints
    dp: Ints
    cp: Ints
    ep: Ints
    micro: Ints
    n_micro: Ints
    chunks: Ints
    recompute: Ints
    zero: Ints
    sp: NDArray[np.bool_]
    schedule: Ints
    order: Ints

    @classmethod
    def of(cls, batch: int | None = None, **values: Any) -> Self:
        """Configurations from scalars or arrays; what is left out is 1, none or the default.

        Parameters
        ----------
        batch : int, optional
            Global batch; gives `n_micro` where it is not given.
        **values : int or array
            Fields by name.

        Returns
        -------
        Configs
            All fields broadcast to one length.

        Raises
        ------
        UnevenSplit
            If the batch cannot be cut into microbatches.
        """
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise CountOutOfRange(f"configuration field {unknown[0]}", ", ".join(names), 0)
        ones = ("tp", "pp", "dp", "cp", "ep", "micro", "n_micro", "chunks")
        full = {name: np.atleast_1d(values.get(name, int(name in ones))) for name in names}
        if batch is not None and "n_micro" not in values:
            rows = full["dp"] * full["micro"]
            if (batch % rows).any():
                bad = int(rows[np.flatnonzero(batch % rows)[0]]) if rows.size > 1 else int(rows[0])
                raise UnevenSplit(
                    "batch / (dp x micro)",
                    f"batch={batch} cannot be split exactly over dp x micro = {bad}; "
                    f"batch={batch // bad * bad or bad} would do",
                )
            full["n_micro"] = batch // rows
        cut = np.broadcast_arrays(*full.values())
        return cls(**dict(zip(names, cut, strict=True)))

    def __len__(self) -> int:
        return len(self.tp)

    def __getitem__(self, index: Any) -> Self:
        picked = {f.name: np.atleast_1d(getattr(self, f.name)[index]) for f in fields(self)}
        return type(self)(**picked)

    def row(self, index: int) -> Mapping[str, Any]:
        """One configuration in words.

        Parameters
        ----------
        index : int
            Which one.

        Returns
        -------
        mapping of str to object
            Its fields by name, words for recompute, schedule and order.
        """
        values = {f.name: getattr(self, f.name)[index].item() for f in fields(self)}
        values["recompute"] = RECOMPUTE[values["recompute"]]
        values["schedule"] = SCHEDULES[values["schedule"]]
        values["order"] = ORDERS[values["order"]]
        return values
