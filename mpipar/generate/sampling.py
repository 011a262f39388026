"""The choice of the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipar.errors import CountOutOfRange, OutOfRange


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes
    ----------
    temperature : float
        0 takes the likeliest token.
    top_k : int
        Draw from so many likeliest tokens; 0 for all.
    top_p : float
        Draw from the fewest tokens that have this probability together (Holtzman et al. 2020).
    seed : int
        A draw depends on it, the request's number and the token's position only.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if not 0.0 <= self.temperature < float("inf"):
            raise OutOfRange("temperature", "0 or more", self.temperature)
        if not 0.0 < self.top_p <= 1.0:
            raise OutOfRange("top_p", "(0, 1]", self.top_p)
        for name in ("top_k", "seed"):
            if getattr(self, name) < 0:
                raise CountOutOfRange(name, "0 or more", getattr(self, name))

    def choose(self, logits: NDArray[Any], request: int, position: int) -> int:
        """Draw one token.

        Parameters
        ----------
        logits : ndarray
            Scores, shape ``(vocabulary,)``.
        request, position : int
            Which draw this is.

        Returns
        -------
        int
            A token.
        """
        if self.temperature == 0.0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: self.top_k or None]
        scores = logits[order].astype(np.float64) / self.temperature
        chances = np.exp(scores - scores[0])
        chances /= chances.sum()
        n = int(np.searchsorted(chances.cumsum(), self.top_p)) + 1
        sums = chances[:n].cumsum()
        stream = np.random.Generator(np.random.Philox([self.seed, request * 2**32 + position]))
        place = np.searchsorted(sums, stream.random() * sums[-1], side="right")
        return int(order[min(int(place), len(sums) - 1)])
