import csv
from pathlib import Path

import numpy as np
import pytest

from mpipar.errors import CountOutOfRange, OutOfRange
from mpipar.topology import fit_cost
from mpipar.topology.cost import bus_factor

DATA = Path(__file__).parents[1] / "data"


def rows(name):
    return list(csv.DictReader((DATA / name).read_text().splitlines()))


def groups():
    found = {}
    for row in rows("nccl_allreduce_one_node.csv"):
        point = (float(row["bytes"]), float(row["time_us"]) * 1e-6)
        found.setdefault(f"{row['gpu']} x {row['ranks']}", []).append(point)
    table = rows("allreduce_busbw_8gpu.csv")
    for column in list(table[0])[1:]:
        found[column] = [
            (n, bus_factor("all_reduce", 8) * n / (float(row[column]) * 1e9))
            for row in table
            for n in [float(row["bytes"])]
        ]
    return {name: points for name, points in found.items() if len(points) > 3}


@pytest.mark.parametrize(("name", "points"), sorted(groups().items()))
def test_measured_all_reduces_are_predicted_with_a_size_left_out(name, points):
    fit = fit_cost(points)
    assert fit.left_out_error <= 0.12
    assert fit.fit_error <= fit.left_out_error
    errors = [abs(float(fit.time(int(n))) / t - 1) for n, t in points]
    assert np.mean(errors) == pytest.approx(fit.fit_error)


def test_an_exact_line_is_found_again():
    fit = fit_cost((n, 3e-6 + 2e-10 * n) for n in (1e3, 1e5, 1e6, 1e8))
    assert fit.constant_s == pytest.approx(3e-6)
    assert fit.per_byte_s == pytest.approx(2e-10)
    assert fit.left_out_error < 1e-9
    link = fit.link("all_reduce", "ring", 4)
    assert link.alpha_s == pytest.approx(5e-7)
    assert link.beta_s_per_byte == pytest.approx(2e-10 / 1.5)


def test_too_little_or_wrong_data_is_refused():
    with pytest.raises(CountOutOfRange, match="3 or more"):
        fit_cost([(1, 1), (1, 2), (2, 3)])
    with pytest.raises(OutOfRange):
        fit_cost([(1, 1), (2, 0), (3, 1)])
