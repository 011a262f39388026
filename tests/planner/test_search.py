import time
from dataclasses import fields, replace

import numpy as np
import pytest

from mpipar.planner.calibration import fabric_of, machine_of
from mpipar.planner.configs import Configs
from mpipar.planner.memory import MIXED
from mpipar.planner.search import ALL, Choices, blocks, layouts, peak_bytes, search
from mpipar.planner.spec import MODELS, gpt
from mpipar.planner.step import step_time
from mpipar.topology import PRESETS

SMALL = gpt("small", 6, 512, 8, 256, 1000)
CLUSTER = PRESETS["dgx-a100"].take(16)
FEW = replace(ALL, max_chunks=2, max_micro=4, schedules=(0, 2))


def everything(spec, n_devices, batch, choices):
    parts = list(blocks(spec, n_devices, batch, choices))
    return Configs(
        **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Configs)}
    )


def find(spec, cluster, batch, choices=ALL, capacity=80e9, keep=64):
    machine, fabric = machine_of(cluster.weakest), fabric_of(cluster)
    return search(
        spec, machine, fabric, cluster.n_devices, batch, capacity, MIXED, choices, keep=keep
    )


def test_every_layout_is_valid_and_none_is_missing():
    """Against nested loops over all numbers."""
    found = {tuple(row) for row in layouts(SMALL, 16, 12, FEW).tolist()}
    expected = set()
    for tp in range(1, 17):
        for pp in range(1, 7):
            for cp in range(1, 17):
                if 16 % (tp * pp * cp) or 8 % tp or (cp > 1 and 256 % (2 * cp)):
                    continue
                dp = 16 // (tp * pp * cp)
                for micro in (1, 2, 3, 4):
                    if 12 % (dp * micro):
                        continue
                    for chunks in (1, 2):
                        if chunks == 1 or (pp > 1 and chunks <= 6 // pp):
                            expected.add((tp, pp, dp, cp, 1, micro, 12 // dp // micro, chunks))
    assert found == expected


def test_configurations_are_distinct_and_have_an_effect():
    configs = everything(SMALL, 16, 16, FEW)
    columns = np.stack([getattr(configs, f.name).astype(int) for f in fields(Configs)], axis=1)
    assert len(np.unique(columns, axis=0)) == len(configs)
    assert ((configs.zero == 0) | (configs.dp * configs.cp > 1)).all()
    assert (configs.tp * configs.pp * configs.dp * configs.cp == 16).all()
    assert (configs.dp * configs.micro * configs.n_micro == 16).all()


def test_the_best_of_the_search_is_the_best_of_all():
    configs = everything(SMALL, 16, 16, FEW)
    machine, fabric = machine_of(CLUSTER.weakest), fabric_of(CLUSTER)
    total = step_time(SMALL, machine, fabric, configs).total
    fits = peak_bytes(SMALL, configs, MIXED) <= 0.3e9
    found = find(SMALL, CLUSTER, 16, FEW, capacity=0.3e9)
    assert found.n_evaluated == len(configs)
    assert found.n_fitting == fits.sum() < len(configs)
    assert found.seconds[0] == total[fits].min()
    degrees = list(zip(found.configs.tp, found.configs.pp, found.configs.cp, strict=True))
    assert len(set(degrees)) == len(degrees)
    assert (np.diff(found.seconds) >= 0).all()


def test_fixed_degrees_and_small_blocks_give_the_same():
    fixed = replace(FEW, fixed=(("tp", 4), ("micro", 2)))
    configs = everything(SMALL, 16, 16, fixed)
    assert set(configs.tp.tolist()) == {4}
    assert set(configs.micro.tolist()) == {2}
    one = sum(len(b) for b in blocks(SMALL, 16, 16, FEW, size=1))
    assert one == sum(len(b) for b in blocks(SMALL, 16, 16, FEW))


def test_nothing_fits_leaves_the_leanest():
    found = find(SMALL, CLUSTER, 16, FEW, capacity=1.0)
    assert len(found.configs) == len(found.seconds) == 0
    everyone = everything(SMALL, 16, 16, FEW)
    assert found.least_bytes == peak_bytes(SMALL, everyone, MIXED).min()


def test_experts_are_laid_over_data_ranks():
    eps = layouts(MODELS["mixtral-8x7b"], 8, 8, Choices(max_tp=1, max_pp=1, max_cp=1))[:, 4]
    assert set(eps.tolist()) == {1, 2, 4, 8}


@pytest.mark.slow
def test_a_million_configurations_a_second_and_a_large_search():
    """The bars of the planner on one core: 1 M/s, and 405B on 16,384 GPUs in 30 s and 2 GiB."""
    resource = pytest.importorskip("resource")
    cluster, start = PRESETS["dgx-h100"].take(16384), time.process_time()
    found = find(MODELS["llama3-405b"], cluster, 2048, capacity=73e9)
    seconds = time.process_time() - start
    assert found.n_evaluated > 10_000_000
    assert found.n_evaluated / seconds > 1e6
    assert seconds < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20
