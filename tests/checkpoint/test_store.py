"""Checkpoints are complete or not there, whatever happens while they are written or afterwards."""

import json
import os
import shutil
import signal
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from mpipar import ThreadWorld, checkpoint
from mpipar.checkpoint import store
from mpipar.comm import IdentityCommunicator
from mpipar.errors import CheckpointError

ONE = IdentityCommunicator()
DTYPES = st.sampled_from(["float16", "float32", "float64", "int64", "uint8", "bool"])


def arrays_of(step):
    return {"w": np.full((3, 2), step, np.float32), "adam.m.w": np.full(5, -step, np.float64)}


def save(folder, *steps, keep=9):
    for step in steps:
        checkpoint.save(ONE, folder, step, arrays_of(step), {"rows_seen": 2 * step}, keep)


def assert_is(place, step):
    arrays, state = checkpoint.load(place)
    assert state == {"rows_seen": 2 * step}
    assert arrays.keys() == arrays_of(step).keys()
    for name, expected in arrays_of(step).items():
        np.testing.assert_array_equal(arrays[name], expected)
        assert arrays[name].dtype == expected.dtype


@settings(max_examples=25)
@given(
    arrays=st.dictionaries(
        st.text("abc.01", min_size=1),
        DTYPES.flatmap(lambda d: npst.arrays(d, npst.array_shapes(min_dims=0, min_side=0))),
        min_size=1,
    ),
    order=st.sampled_from(["C", "F", "reversed"]),
)
def test_round_trip(tmp_path_factory, arrays, order):
    layouts = {"C": np.array, "F": np.asfortranarray, "reversed": lambda a: a[::-1]}
    given_ = {n: layouts[order](a) if a.ndim else a for n, a in arrays.items()}
    folder = tmp_path_factory.mktemp("round")
    place = checkpoint.save(ONE, folder, 1, given_, {"é": [1, None]})
    loaded, state = checkpoint.load(place)
    assert state == {"é": [1, None]}
    assert loaded.keys() == given_.keys()
    for name, array in given_.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)


def test_the_newest_stays_and_the_oldest_go(tmp_path):
    save(tmp_path, 5, 40, 7, 1000, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000040", "step-000001000"]
    assert_is(checkpoint.newest(ONE, tmp_path), 1000)


def test_keep_0_keeps_all(tmp_path):
    save(tmp_path, 1, 2, 3, 4, keep=0)
    assert len(list(tmp_path.iterdir())) == 4


def test_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 1)
    checkpoint.save(ONE, tmp_path, 1, {"w": np.ones(1)}, {})
    assert list(checkpoint.load(checkpoint.newest(ONE, tmp_path))[0]) == ["w"]


def test_several_writers_and_reading_a_part(tmp_path):
    def body(comm):
        mine = {f"w{comm.rank}": np.full(2, comm.rank)}
        checkpoint.save(comm, tmp_path, 3, mine, {"rank": comm.rank}, is_writer=comm.rank > 0)
        place = checkpoint.newest(comm, tmp_path)
        return checkpoint.load(place, [f"w{max(1, comm.rank)}"])

    for rank, (arrays, state) in enumerate(ThreadWorld(3).run(body)):
        np.testing.assert_array_equal(arrays[f"w{max(1, rank)}"], max(1, rank))
        assert state == {"rank": 0}
    names = sorted(p.name for p in (tmp_path / "step-000000003").iterdir())
    assert names == ["arrays-1.safetensors", "arrays-2.safetensors", "index.json"]
    with pytest.raises(CheckpointError, match="lacks w0"):
        checkpoint.load(tmp_path / "step-000000003", ["w0", "w1"])


# -- damage ----------------------------------------------------------------------------------


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def flip(file):
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)


def test_a_file_that_is_cut_short_or_gone_is_named_and_the_one_before_is_newest(tmp_path):
    for damage, says in (
        (cut, "has .* bytes instead of"),
        (lambda f: f.unlink(), "cannot be read: No such file"),
    ):
        save(tmp_path, 1, 2)
        file = tmp_path / "step-000000002" / "arrays-0.safetensors"
        damage(file)
        assert_is(checkpoint.newest(ONE, tmp_path), 1)
        with pytest.raises(CheckpointError, match=rf"step-000000002.arrays-0\.safetensors {says}"):
            checkpoint.load(file.parent)


@pytest.mark.parametrize("step", [1, 2])
def test_an_altered_file_is_named(tmp_path, step):
    save(tmp_path, 1, 2)
    place = tmp_path / f"step-00000000{step}"
    flip(place / "arrays-0.safetensors")
    with pytest.raises(CheckpointError, match=r"arrays-0\.safetensors was altered"):
        checkpoint.load(place)
    assert_is(tmp_path / f"step-00000000{3 - step}", 3 - step)


def other_state(file):
    index = json.loads(file.read_text())
    index["state"]["rows_seen"] += 1
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "damage", [cut, other_state, lambda f: f.unlink(), lambda f: f.write_text("[]")]
)
def test_a_damaged_index_is_named_and_the_one_before_is_newest(tmp_path, damage):
    save(tmp_path, 1, 2)
    damage(tmp_path / "step-000000002" / "index.json")
    assert_is(checkpoint.newest(ONE, tmp_path), 1)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        checkpoint.load(tmp_path / "step-000000002")


def test_a_damaged_checkpoint_does_not_count_among_those_that_stay(tmp_path):
    save(tmp_path, 1, 2)
    cut(tmp_path / "step-000000002" / "arrays-0.safetensors")
    save(tmp_path, 3, keep=2)
    assert_is(tmp_path / "step-000000001", 1)


def test_nothing_there(tmp_path):
    assert checkpoint.newest(ONE, tmp_path / "absent") is None
    (tmp_path / "step-7").mkdir()
    (tmp_path / "notes").touch()
    assert checkpoint.newest(ONE, tmp_path) is None
    with pytest.raises(CheckpointError, match=r"absent.index\.json cannot be read"):
        checkpoint.load(tmp_path / "absent")


def test_ranks_agree_on_the_newest_that_all_see(tmp_path):
    """One rank's newest is missing or cut short: as on a file system that lags behind."""
    for rank, steps in enumerate([(1, 2, 3), (1, 2), (2, 3)]):
        save(tmp_path / str(rank), *steps)
    cut(tmp_path / "0" / "step-000000003" / "arrays-0.safetensors")

    def body(comm):
        return checkpoint.newest(comm, tmp_path / str(comm.rank)).name

    assert ThreadWorld(3).run(body) == ["step-000000002"] * 3


@pytest.mark.parametrize("writer", [0, 1])
def test_a_failed_write_is_told_to_all_ranks_and_leaves_the_one_before(tmp_path, writer):
    save(tmp_path, 1)

    def body(comm):
        arrays = arrays_of(2)
        if comm.rank == writer:
            arrays["w"] = np.array(["no", "numbers"])
        with pytest.raises(CheckpointError, match="step-000000002 could not be written"):
            checkpoint.save(comm, tmp_path, 2, arrays, {}, is_writer=comm.rank <= writer)
        return int(comm.all_reduce(1))

    assert ThreadWorld(3).run(body) == [3] * 3
    assert_is(checkpoint.newest(ONE, tmp_path), 1)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "file", 2)


# -- killed ----------------------------------------------------------------------------------

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def save_and_die(folder, nth, steps):
    """In a child: save the steps, killed at the nth look at or change of the file system."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen = 0

    def audit(event, arguments):
        nonlocal seen
        if event in EVENTS and (event == "os.mkdir" or str(folder) in str(arguments[0])):
            seen += 1
            if seen == nth:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    try:
        save(folder, *steps, keep=1)
    finally:
        os._exit(0)


@pytest.mark.parametrize("step", [2, 1], ids=["next", "same"])
def test_killed_at_any_point_of_a_save_a_whole_checkpoint_is_there(tmp_path, step):
    """At every one of some thirty calls; the one before or the new one, never neither."""
    found = []
    for nth in range(1, 200):
        folder = tmp_path / str(nth)
        checkpoint.save(ONE, folder, 1, arrays_of(7), {"rows_seen": 14}, 1)
        code = save_and_die(folder, nth, [step])
        place = checkpoint.newest(ONE, folder)
        arrays, state = checkpoint.load(place)
        value = int(arrays["w"][0, 0])
        assert value in (7, step)
        assert state == {"rows_seen": 2 * value}
        found.append(value)
        save(folder, 3, keep=1)  # and what the killed one has left is cleared away
        assert [p.name for p in folder.iterdir()] == ["step-000000003"]
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0
    assert len(found) > 15
    assert found == sorted(found, reverse=step < 7)  # the old one until the new one stands
    assert {7, step} == set(found)


def test_the_kill_test_would_see_a_checkpoint_that_goes_too_early(tmp_path, monkeypatch):
    publish = store.publish

    def hasty(folder, *arguments):
        for old in folder.glob("step-*"):
            shutil.rmtree(old)
        publish(folder, *arguments)

    monkeypatch.setattr(store, "publish", hasty)
    lost = 0
    for nth in range(1, 40):
        folder = tmp_path / str(nth)
        save(folder, 1)
        save_and_die(folder, nth, [2])
        lost += checkpoint.newest(ONE, folder) is None
    assert lost


# -- in the background -----------------------------------------------------------------------


def background(comm, folder, slow_rank=None):
    """Two saves in the background while the arrays change; what is newest meanwhile."""
    saver = checkpoint.Saver(comm)
    w = np.full((3, 2), 1.0)
    writing = saver._write

    def late(*arguments):
        gate.wait(30)
        writing(*arguments)

    gate = threading.Event()
    if comm.rank == slow_rank:
        saver._write = late
    saver.begin(folder, 1, {f"w{comm.rank}": w}, {"step": 1}, is_writer=True)
    w[...] = 99
    for _ in range(200):
        done = saver.poll()
        comm.barrier()
    early = comm.all_gather_json([done, folder.exists() and len(list(folder.glob("step-*")))])
    gate.set()
    saver.begin(folder, 2, {f"w{comm.rank}": w}, {"step": 2}, is_writer=True)
    saver.close()
    return early


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_save_in_the_background_holds_what_the_arrays_held(tmp_path, n):
    early = ThreadWorld(n, deadline_s=60).run(background, tmp_path, n - 1)
    assert early[0] == [[False, 0]] * n  # one rank has not written: nothing stands
    for step, value in ((1, 1.0), (2, 99.0)):
        arrays, state = checkpoint.load(tmp_path / f"step-00000000{step}")
        assert state == {"step": step}
        assert sorted(arrays) == [f"w{rank}" for rank in range(n)]
        assert all((a == value).all() for a in arrays.values())


def test_a_save_in_the_background_ends_by_polling_alone(tmp_path):
    def body(comm):
        saver = checkpoint.Saver(comm)
        saver.begin(tmp_path, 1, {"w": np.ones(3)}, {"step": 1})
        deadline = time.monotonic() + 30
        while not saver.poll() and time.monotonic() < deadline:
            time.sleep(0.001)
        comm.barrier()
        return checkpoint.newest(comm, tmp_path).name

    assert ThreadWorld(2).run(body) == ["step-000000001"] * 2


def test_a_failed_save_in_the_background_is_told_to_all_at_the_next(tmp_path):
    def body(comm):
        saver = checkpoint.Saver(comm)
        if comm.rank == 1:
            saver._write = lambda *_: setattr(saver, "_problem", OSError("disk full"))
        saver.begin(tmp_path, 1, {"w": np.ones(3)}, {"step": 1}, is_writer=True)
        with pytest.raises(CheckpointError, match="could not be written: disk full"):
            saver.finish()
        saver.finish()  # once
        return checkpoint.newest(comm, tmp_path)

    assert ThreadWorld(3).run(body) == [None] * 3
