import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.errors import CountOutOfRange, OutOfRange
from mpipar.topology import LinkCost, cheapest, collective_cost
from mpipar.topology.cost import FORMS, bus_factor, hierarchical_cost
from mpipar.units import Bytes

LINK = LinkCost(1e-6, 1e-9, 1e-10)


class Network:
    """Ranks that exchange blocks of one byte each; counts what every rank sends and the rounds."""

    def __init__(self, p: int) -> None:
        self.p, self.rounds, self.sent = p, 0, [0] * p

    def round(self, messages: list[tuple[int, int]]) -> None:
        """One round of (source, bytes) messages, all at once; a rank sends at most one."""
        assert len({source for source, _ in messages}) == len(messages)
        self.rounds += 1
        for source, n in messages:
            self.sent[source] += n


def run_ring_all_reduce(p: int) -> Network:
    """Really sum one vector of p blocks over p ranks by a ring, moving block after block."""
    net = Network(p)
    data = [[{r} for _ in range(p)] for r in range(p)]
    for step in range(p - 1):
        out = [(r, (r - step) % p) for r in range(p)]
        moved = [(r, b, set(data[r][b])) for r, b in out]
        net.round([(r, 1) for r, _ in out])
        for r, b, block in moved:
            data[(r + 1) % p][b] |= block
    for step in range(p - 1):
        moved = [(r, (r + 1 - step) % p, data[r][(r + 1 - step) % p]) for r in range(p)]
        net.round([(r, 1) for r, _, _ in moved])
        for r, b, block in moved:
            data[(r + 1) % p][b] = set(block)
    assert all(block == set(range(p)) for row in data for block in row)
    return net


def run_rabenseifner(p: int) -> Network:
    """Recursive halving then doubling over the power of two below p, others folded in."""
    net, core = Network(p), 1 << (p.bit_length() - 1)
    if core < p:
        net.round([(r, core) for r in range(core, p)])
    width = core
    while width > 1:
        width //= 2
        net.round([(r, width) for r in range(core)])
    while width < core:
        net.round([(r, width) for r in range(core)])
        width *= 2
    if core < p:
        net.round([(r - core, core) for r in range(core, p)])
    return net


def run_bruck_all_to_all(p: int) -> Network:
    net, bit = Network(p), 1
    blocks = [{(r, to) for to in range(p)} for r in range(p)]
    while bit < p:
        out = [{(s, to) for s, to in blocks[r] if (to - r) % p & bit} for r in range(p)]
        net.round([(r, len(out[r])) for r in range(p)])
        for r in range(p):
            blocks[r] -= out[r]
        for r in range(p):
            blocks[(r + bit) % p] |= out[r]
        bit *= 2
    assert all(to == r for r in range(p) for _, to in blocks[r])
    return net


@pytest.mark.parametrize("p", range(2, 18))
def test_counts_equal_those_of_a_run(p):
    for op, algorithm, net, n in (
        ("all_reduce", "ring", run_ring_all_reduce(p), p),
        ("all_to_all", "bruck", run_bruck_all_to_all(p), p),
    ):
        cost = collective_cost(op, algorithm, p, n, LINK)
        assert (cost.n_rounds, int(cost.sent)) == (net.rounds, max(net.sent))
    core = 1 << (p.bit_length() - 1)
    net = run_rabenseifner(p)
    cost = collective_cost("all_reduce", "rabenseifner", p, core, LINK)
    assert cost.n_rounds == net.rounds
    fold = core if core < p else 0
    assert int(cost.sent) == max(net.sent) + fold


@pytest.mark.parametrize("p", [2, 4, 8, 64])
def test_textbook_values(p):
    """The formulas as printed by Thakur et al. 2005 for powers of two."""
    a, b, g, n, lg, f = 1e-6, 1e-9, 1e-10, 2**20, int(math.log2(p)), (p - 1) / p
    printed = {
        ("all_reduce", "ring"): 2 * (p - 1) * a + 2 * f * n * b + f * n * g,
        ("all_reduce", "recursive_doubling"): lg * (a + n * b + n * g),
        ("all_reduce", "rabenseifner"): 2 * lg * a + 2 * f * n * b + f * n * g,
        ("reduce_scatter", "recursive_halving"): lg * a + f * n * (b + g),
        ("all_gather", "bruck"): lg * a + f * n * b,
        ("broadcast", "binomial"): lg * (a + n * b),
        ("broadcast", "scatter_all_gather"): (lg + p - 1) * a + 2 * f * n * b,
        ("reduce", "binomial"): lg * (a + n * b + n * g),
        ("reduce", "rabenseifner"): 2 * lg * a + 2 * f * n * b + f * n * g,
        ("all_to_all", "bruck"): lg * a + n / 2 * lg * b,
        ("all_to_all", "pairwise"): (p - 1) * a + f * n * b,
    }
    for (op, algorithm), time in printed.items():
        cost = collective_cost(op, algorithm, p, n, LINK)
        assert float(cost.time) == pytest.approx(time, rel=1e-12)


@given(st.integers(2, 300), st.integers(0, 2**40))
def test_no_link_carries_more_than_its_capacity_and_no_bound_is_beaten(p, n):
    """Chan et al. 2007: the lower bounds of all-reduce, for every algorithm that sends messages."""
    for op, forms in FORMS.items():
        for algorithm in forms:
            cost = collective_cost(op, algorithm, p, n, LINK)
            assert float(cost.time) * 1e9 * (1 + 1e-9) + 1 >= int(cost.sent)
            if algorithm != "shared_memory" and op == "all_reduce":
                assert cost.n_rounds >= math.ceil(math.log2(p))
                assert int(cost.sent) >= math.floor(2 * (p - 1) / p * n * (1 - 1e-12))


def test_cheapest_changes_with_size():
    assert cheapest("all_reduce", 8, 64, LINK).algorithm == "recursive_doubling"
    assert cheapest("all_reduce", 6, 2**26, LINK).algorithm == "ring"
    assert cheapest("all_to_all", 16, 160, LINK).algorithm == "bruck"
    assert cheapest("all_to_all", 16, 2**26, LINK).algorithm == "pairwise"


def test_hierarchy_beats_a_flat_ring_over_a_slow_network():
    local, between = LinkCost(1e-6, 1e-11), LinkCost(5e-6, 1e-10)
    n = 2**28
    two = hierarchical_cost("all_reduce", 8, 4, n, local, between)
    assert float(two.time) < float(collective_cost("all_reduce", "ring", 32, n, between).time)
    expected = 2 * 7 / 8 * n * 1e-11 + 2 * 3 / 4 * n / 8 * 1e-10
    assert float(two.time) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("op", sorted(set(FORMS) - {"send"}))
def test_two_levels_of_one_are_the_flat_collective(op):
    n, free = 2**20, LinkCost(0.0, 0.0)
    for sizes, links in (((8, 1), (LINK, free)), ((1, 8), (free, LINK))):
        two = hierarchical_cost(op, *sizes, n, *links)
        flat = cheapest(op, 8, n, LINK)
        assert float(two.time) >= float(flat.time) * (1 - 1e-9)
        assert float(two.time) <= 3 * float(flat.time) + 1e-12
    with pytest.raises(OutOfRange, match="all_reduce"):
        hierarchical_cost("send", 2, 2, 1, LINK, LINK)


def test_one_rank_costs_nothing_and_mistakes_are_named():
    assert int(collective_cost("all_reduce", "ring", 1, 100, LINK).sent) == 0
    with pytest.raises(OutOfRange, match="ring, recursive_doubling, rabenseifner"):
        collective_cost("all_reduce", "tree", 2, 1, LINK)
    with pytest.raises(CountOutOfRange):
        collective_cost("all_reduce", "ring", 0, 1, LINK)
    with pytest.raises(OutOfRange):
        LinkCost(-1, 0)
    assert collective_cost("send", "direct", 2, Bytes(5), LINK).sent == Bytes(5)


def test_bus_factors():
    assert bus_factor("all_reduce", 8) == 1.75
    assert bus_factor("all_gather", 8) == 0.875
    assert bus_factor("broadcast", 8) == 1
