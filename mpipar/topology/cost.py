"""What collectives cost: rounds, bytes and time of each algorithm in the alpha-beta model.

A message of n bytes takes ``alpha + n beta`` and reducing n bytes takes ``n gamma``. Each form
counts, along the longest chain of messages, the rounds, bytes sent and bytes reduced (Thakur,
Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH"; Chan,
Heimlich, Purkayastha and van de Geijn 2007; Patarasuk and Yuan 2009). ``n`` is always the whole
vector: all ranks' parts together for all-gather, reduce-scatter and all-to-all (what one rank
holds), gather and scatter.

Off a power of two, recursive halving and doubling first *fold*: each rank above it hands its
vector to a partner and gets the result back, two rounds more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mpipar.errors import CountOutOfRange, OutOfRange
from mpipar.units import Bytes, Seconds

Form = Callable[[int, float], tuple[float, float, float]]
"""(ranks, bytes of the whole vector) to (rounds, bytes sent, bytes reduced)."""


def _lg(p: int) -> int:
    return (p - 1).bit_length()


def _share(p: int) -> float:
    return (p - 1) / p


def _ring_all_reduce(p: int, n: float) -> tuple[float, float, float]:
    return 2 * (p - 1), 2 * _share(p) * n, _share(p) * n


def _doubling_all_reduce(p: int, n: float) -> tuple[float, float, float]:
    fold = p & (p - 1) != 0
    rounds = p.bit_length() - 1
    return rounds + 2 * fold, (rounds + 2 * fold) * n, (rounds + fold) * n


def _rabenseifner_all_reduce(p: int, n: float) -> tuple[float, float, float]:
    core, fold = 1 << (p.bit_length() - 1), p & (p - 1) != 0
    return 2 * _lg(core) + 2 * fold, (2 * _share(core) + 2 * fold) * n, (_share(core) + fold) * n


def _halving_reduce_scatter(p: int, n: float) -> tuple[float, float, float]:
    core, fold = 1 << (p.bit_length() - 1), p & (p - 1) != 0
    sent = _share(core) * n + fold * (n + n / p)
    return _lg(core) + 2 * fold, sent, (_share(core) + fold) * n


def _rabenseifner_reduce(p: int, n: float) -> tuple[float, float, float]:
    rounds, sent, reduced = _halving_reduce_scatter(p, n)
    return rounds + _lg(p), sent + _share(p) * n, reduced


FORMS: Mapping[str, Mapping[str, Form]] = MappingProxyType(
    {
        "all_reduce": {
            "ring": _ring_all_reduce,
            "recursive_doubling": _doubling_all_reduce,
            "rabenseifner": _rabenseifner_all_reduce,
            "shared_memory": lambda p, n: (2, n * (1 + 1 / p), _share(p) * n),
        },
        "reduce_scatter": {
            "ring": lambda p, n: (p - 1, _share(p) * n, _share(p) * n),
            "recursive_halving": _halving_reduce_scatter,
            "pairwise": lambda p, n: (p - 1, _share(p) * n, _share(p) * n),
            "shared_memory": lambda p, n: (2, n * (1 + 1 / p), _share(p) * n),
        },
        "all_gather": {
            "ring": lambda p, n: (p - 1, _share(p) * n, 0),
            "bruck": lambda p, n: (_lg(p), _share(p) * n, 0),
            "shared_memory": lambda p, n: (2, n / p, 0),
        },
        "broadcast": {
            "binomial": lambda p, n: (_lg(p), _lg(p) * n, 0),
            "scatter_doubling": lambda p, n: (2 * _lg(p), 2 * _share(p) * n, 0),
            "scatter_all_gather": lambda p, n: (_lg(p) + p - 1, 2 * _share(p) * n, 0),
            "shared_memory": lambda p, n: (2, n, 0),
        },
        "reduce": {
            "binomial": lambda p, n: (_lg(p), _lg(p) * n, _lg(p) * n),
            "rabenseifner": _rabenseifner_reduce,
            "shared_memory": lambda p, n: (2, n * (1 + 1 / p), _share(p) * n),
        },
        "gather": {
            "binomial": lambda p, n: (_lg(p), _share(p) * n, 0),
            "shared_memory": lambda p, n: (2, n / p, 0),
        },
        "scatter": {
            "binomial": lambda p, n: (_lg(p), _share(p) * n, 0),
            "shared_memory": lambda p, n: (2, n / p, 0),
        },
        "all_to_all": {
            "pairwise": lambda p, n: (p - 1, _share(p) * n, 0),
            "bruck": lambda p, n: (_lg(p), _bruck_blocks(p) * n / p, 0),
            "shared_memory": lambda p, n: (2, n, 0),
        },
        "send": {"direct": lambda p, n: (1, n, 0)},
        "barrier": {
            "dissemination": lambda p, n: (_lg(p), 0, 0),
            "shared_memory": lambda p, n: (1, 0, 0),
        },
    }
)
"""Algorithms of each collective. `shared_memory` counts bytes copied by one rank of a node."""


def _bruck_blocks(p: int) -> int:
    """Blocks a rank forwards in Bruck's all-to-all: one for each set bit of each distance."""
    return sum(distance.bit_count() for distance in range(p))


def bus_factor(op: str, n_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth (bytes / time), as in the nccl-tests convention."""
    share = _share(n_ranks)
    factors = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share}
    return (factors | {"all_to_all": share}).get(op, 1.0)


@dataclass(frozen=True)
class LinkCost:
    """What one message costs.

    Parameters
    ----------
    alpha_s : float
        Seconds for each message.
    beta_s_per_byte : float
        Seconds for each byte sent.
    gamma_s_per_byte : float
        Seconds for each byte reduced.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for role, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise OutOfRange(role, "0 or more and finite", value)


@dataclass(frozen=True)
class CollectiveCost:
    """Cost of one collective along its longest chain of messages.

    Parameters
    ----------
    algorithm : str
        Which one; parts of a hierarchical one are joined by ``+``.
    time : Seconds
        Of the whole collective.
    sent : Bytes
        Bytes sent along the chain, rounded up.
    n_rounds : int
        Messages one after the other.
    """

    algorithm: str
    time: Seconds
    sent: Bytes
    n_rounds: int


def collective_cost(
    op: str, algorithm: str, n_ranks: int, n_bytes: Bytes | int, link: LinkCost
) -> CollectiveCost:
    """Cost of one algorithm.

    Parameters
    ----------
    op, algorithm : str
        Keys of `FORMS`.
    n_ranks : int
        Ranks of the group; one rank costs nothing.
    n_bytes : Bytes or int
        The whole vector.
    link : LinkCost
        Of one message between any two ranks.

    Returns
    -------
    CollectiveCost
        Time, bytes and rounds.

    Raises
    ------
    OutOfRange
        If there is no such algorithm; the message lists those of the collective.
    """
    if n_ranks < 1:
        raise CountOutOfRange("ranks of a collective", "1 or more", n_ranks)
    known = FORMS.get(op, {})
    if algorithm not in known:
        names = ", ".join(known) or f"none: collectives are {', '.join(FORMS)}"
        raise OutOfRange(f"algorithm of {op}", f"{{{names}}}", algorithm)  # type: ignore[arg-type]
    n = int(Bytes(n_bytes))
    rounds, sent, reduced = known[algorithm](n_ranks, n) if n_ranks > 1 else (0, 0, 0)
    time = rounds * link.alpha_s + sent * link.beta_s_per_byte + reduced * link.gamma_s_per_byte
    return CollectiveCost(algorithm, Seconds(time), Bytes(-int(-sent // 1)), int(rounds))


def cheapest(
    op: str,
    n_ranks: int,
    n_bytes: Bytes | int,
    link: LinkCost,
    among: Sequence[str] | None = None,
) -> CollectiveCost:
    """The cheapest algorithm for a size; ties by name.

    Parameters
    ----------
    op : str
        Key of `FORMS`.
    n_ranks : int
        Ranks of the group.
    n_bytes : Bytes or int
        The whole vector.
    link : LinkCost
        Of one message.
    among : sequence of str, optional
        Algorithms to choose from (default: all that send messages).

    Returns
    -------
    CollectiveCost
        The cheapest.
    """
    names = among or [name for name in FORMS.get(op, {"": None}) if name != "shared_memory"]
    costs = [collective_cost(op, name, n_ranks, n_bytes, link) for name in names]
    return min(costs, key=lambda cost: (float(cost.time), cost.algorithm))


_HIERARCHY: Mapping[str, tuple[tuple[str, str, str], ...]] = MappingProxyType(
    {
        "all_reduce": (
            ("reduce_scatter", "local", "all"),
            ("all_reduce", "between", "slice"),
            ("all_gather", "local", "all"),
        ),
        "reduce_scatter": (
            ("reduce_scatter", "local", "all"),
            ("reduce_scatter", "between", "slice"),
        ),
        "all_gather": (("all_gather", "between", "slice"), ("all_gather", "local", "all")),
        "broadcast": (
            ("scatter", "local", "all"),
            ("broadcast", "between", "slice"),
            ("all_gather", "local", "all"),
        ),
        "reduce": (
            ("reduce_scatter", "local", "all"),
            ("reduce", "between", "slice"),
            ("gather", "local", "all"),
        ),
        "gather": (("gather", "local", "node"), ("gather", "between", "all")),
        "scatter": (("scatter", "between", "all"), ("scatter", "local", "node")),
        "all_to_all": (("all_to_all", "local", "all"), ("all_to_all", "between", "all")),
        "barrier": (
            ("barrier", "local", "all"),
            ("barrier", "between", "all"),
            ("barrier", "local", "all"),
        ),
    }
)
"""Parts of each collective over nodes: what, where, and how much of the vector takes part."""


def hierarchical_cost(
    op: str,
    n_local: int,
    n_nodes: int,
    n_bytes: Bytes | int,
    local: LinkCost,
    between: LinkCost,
) -> CollectiveCost:
    """Cost of a collective in two levels, where every local rank leads its own slice.

    Parameters
    ----------
    op : str
        Any collective of `FORMS` but ``send``.
    n_local, n_nodes : int
        Ranks of a node, and nodes.
    n_bytes : Bytes or int
        The whole vector.
    local, between : LinkCost
        Of one message inside a node, and between nodes.

    Returns
    -------
    CollectiveCost
        Of the parts together, each by its cheapest algorithm; an all-reduce is a reduce-scatter
        in the node, an all-reduce of every slice between nodes and an all-gather in the node.

    Raises
    ------
    OutOfRange
        If there is no such collective.
    """
    if op not in _HIERARCHY:
        raise OutOfRange("hierarchical collective", f"{{{', '.join(_HIERARCHY)}}}", op)  # type: ignore[arg-type]
    whole = int(Bytes(n_bytes))
    share = {"all": whole, "slice": -(-whole // n_local), "node": -(-whole // n_nodes)}
    ranks, links = {"local": n_local, "between": n_nodes}, {"local": local, "between": between}
    parts = [
        cheapest(part, ranks[where], share[what], links[where])
        for part, where, what in _HIERARCHY[op]
    ]
    return CollectiveCost(
        "+".join(part.algorithm for part in parts),
        Seconds(sum(float(part.time) for part in parts)),
        Bytes(sum(int(part.sent) for part in parts)),
        sum(part.n_rounds for part in parts),
    )
