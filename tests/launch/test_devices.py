"""Device choice: strings as Slurm, users and containers really set them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar.launch.devices import (
    DeviceChoice,
    VisibleDevices,
    choose_device,
    read_visible,
    shared_devices,
)

BUSES = ["0000:07:00.0", "0000:46:00.0", "0000:85:00.0", "0000:c7:00.0"]
UUIDS = ["GPU-8c2b9f1e-aa", "GPU-8c77d0aa-bb", "GPU-1f00ba52-cc"]
MIG = "MIG-GPU-8c2b9f1e-aa/3/0"


@pytest.mark.parametrize(
    ("environment", "entries"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "2,-1,3"}, ("2",)),  # CUDA stops at the first that is none
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ("0", "1", "2", "3")),
        ({"CUDA_VISIBLE_DEVICES": f"{UUIDS[0]}, {UUIDS[1]}"}, (UUIDS[0], UUIDS[1])),
        ({"CUDA_VISIBLE_DEVICES": MIG}, (MIG,)),
        ({"ROCR_VISIBLE_DEVICES": "4"}, ("4",)),
        ({"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "4"}, ("1",)),
    ],
)
def test_what_is_visible(environment: dict[str, str], entries: tuple[str, ...] | None) -> None:
    assert read_visible(environment).entries == entries


# what each task of a node of four GPUs gets, as recorded under Slurm 22.05 -> entries taken
SLURM = {
    "--gpus-per-node=4": (["0,1,2,3"] * 4, ["0", "1", "2", "3"]),
    "--gpus-per-task=1": (["0", "1", "2", "3"], ["0", "1", "2", "3"]),
    "--gpu-bind=map_gpu:3,2,1,0": (["3", "2", "1", "0"], ["3", "2", "1", "0"]),
    "--ntasks-per-gpu=2": (["0", "0", "1", "1"], ["0", "0", "1", "1"]),
    "the second of two jobs": (["2,3"] * 2, ["2", "3"]),
    "--gpus-per-task=1 and mpirun, first node": (["0,1"] * 2, ["0", "1"]),
    "--gpus-per-task=1 and mpirun, second node": (["0"] * 2, ["0", "0"]),
}


@pytest.mark.parametrize(("lists", "taken"), SLURM.values(), ids=SLURM)
def test_what_the_tasks_of_slurm_take(lists: list[str], taken: list[str]) -> None:
    choices = [
        choose_device(read_visible({"CUDA_VISIBLE_DEVICES": text}), local)
        for local, text in enumerate(lists)
    ]
    assert [choice.entry for choice in choices if choice] == taken
    for text, choice in zip(lists, choices, strict=True):
        assert choice is not None
        if "," not in text:
            assert choice.index == 0  # the only one, whatever it is called
    shared = shared_devices((rank, "n1", choice) for rank, choice in enumerate(choices))
    assert bool(shared) == (len(set(taken)) < len(taken))


def test_unset_takes_what_the_driver_shows_and_nothing_without_one() -> None:
    everything = VisibleDevices("", None)
    assert choose_device(everything, 2) is None
    assert choose_device(everything, 6, BUSES) == DeviceChoice(2, 4, "2", BUSES[2])
    assert choose_device(VisibleDevices("CUDA_VISIBLE_DEVICES", ()), 0, BUSES) is None


def test_numbers_and_beginnings_of_uuids_become_ids() -> None:
    by_number = choose_device(read_visible({"CUDA_VISIBLE_DEVICES": "3"}), 1, BUSES)
    assert by_number == DeviceChoice(0, 1, "3", BUSES[3])
    beyond = choose_device(read_visible({"CUDA_VISIBLE_DEVICES": "7"}), 0, BUSES)
    assert beyond == DeviceChoice(0, 1, "7", "")
    short = choose_device(read_visible({"CUDA_VISIBLE_DEVICES": "GPU-1f"}), 0, UUIDS)
    assert short is not None
    assert short.device_id == UUIDS[2]
    unclear = choose_device(read_visible({"CUDA_VISIBLE_DEVICES": "GPU-8c"}), 0, UUIDS)
    assert unclear is not None
    assert unclear.device_id == "GPU-8c"


def test_sharing_is_named_by_rank_node_and_device() -> None:
    one = DeviceChoice(0, 1, "0", BUSES[0])
    other = DeviceChoice(0, 1, "0", BUSES[1])  # the same number in another task's cgroup
    assert shared_devices([(0, "n1", one), (1, "n1", other), (2, "n2", one), (3, "n2", None)]) == []
    assert shared_devices([(0, "n1", one), (1, "n1", other), (5, "n1", one)]) == [
        "ranks 0, 5 on n1 share one device (0000:07:00.0)"
    ]


@given(st.text(max_size=30), st.none() | st.integers(0, 200), st.integers(0, 4))
def test_no_string_breaks_the_choice(text: str, local: int | None, n_devices: int) -> None:
    visible = read_visible({"CUDA_VISIBLE_DEVICES": text})
    choice = choose_device(visible, local, BUSES[:n_devices])
    assert (choice is None) == (visible.entries == ())
    if choice is not None:
        assert 0 <= choice.index < choice.n_visible
        assert choice.entry in text
