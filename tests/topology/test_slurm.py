import pytest

from mpipar.errors import LayoutError
from mpipar.topology.slurm import expand_hosts, job_from_environment, parse_topology_conf


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a1", ["a1"]),
        ("a[08-10,2],b", ["a08", "a09", "a10", "a2", "b"]),
        ("r[0-1]n[1-2]-ib", ["r0n1-ib", "r0n2-ib", "r1n1-ib", "r1n2-ib"]),
        ("", []),
    ],
)
def test_host_lists(text, hosts):
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["a[1-2", "a]1[", "a[3-1]", "a[x]"])
def test_broken_host_lists(text):
    with pytest.raises(LayoutError, match="host list"):
        expand_hosts(text)


CONF = r"""
# two leaves
SwitchName=leaf0 Nodes=n[0-3] LinkSpeed=100
switchname=leaf1 \
    nodes=n[4-7]
SwitchName=top Switches=leaf[0-1]
"""


def test_topology_conf():
    tree = parse_topology_conf(CONF)
    assert tree.route("n5") == ("leaf1", "top")
    assert tree.level_sizes() == (4, 8)


def test_topology_conf_faults():
    with pytest.raises(LayoutError, match="line 1"):
        parse_topology_conf("Nodes=a")
    with pytest.raises(LayoutError, match="above itself"):
        parse_topology_conf("SwitchName=a Switches=b\nSwitchName=b Switches=a Nodes=n").route("n")


def test_environment_of_a_job():
    job = job_from_environment(
        {
            "SLURM_JOB_NODELIST": "n[0-3]",
            "SLURM_TASKS_PER_NODE": "8(x3),4",
            "SLURM_TOPOLOGY_ADDR": "top.leaf0.n1",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
            "SLURM_GPUS_ON_NODE": "4",
        }
    )
    assert job.nodes == ("n0", "n1", "n2", "n3")
    assert job.tasks_per_node == (8, 8, 8, 4)
    assert job.switches == ("leaf0", "top")
    assert job.gpus_on_node == 4
    assert job_from_environment({}) is None


def test_heterogeneous_job_joins_its_groups():
    job = job_from_environment(
        {
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "a[0-1]",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "b0",
            "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2(x2)",
            "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1",
        }
    )
    assert job.nodes == ("a0", "a1", "b0")
    assert job.tasks_per_node == (2, 2, 1)
