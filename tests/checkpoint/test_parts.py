"""Parts of arrays: written at one degree, read at another, no more than is needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar import checkpoint
from mpipar.checkpoint import Extent, reader
from mpipar.comm import IdentityCommunicator, ThreadWorld
from mpipar.errors import CheckpointError
from mpipar.tensor_parallel import ShardedParameter

degrees = st.integers(1, 5)


@st.composite
def parameters(draw):
    """Shape, split dim, segments and padding of a parameter that any of two degrees can split."""
    n, m = draw(degrees), draw(degrees)
    dim = draw(st.sampled_from([None, 0, 1]))
    padded = dim is not None and draw(st.booleans())
    sizes = st.integers(1, 7) if padded else st.integers(1, 2).map(lambda k: k * n * m)
    segments = tuple(draw(st.lists(sizes, min_size=1, max_size=1 if padded else 3)))
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    if dim is not None:
        shape[dim] = sum(segments)
    whole = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    split = [ShardedParameter(tuple(shape), k, dim, segments, padded) for k in (n, m)]
    return whole, *split


def write(folder, whole, shard):
    """A checkpoint of the ranks of a degree."""

    def body(comm):
        extent = Extent.of(shard, comm.rank)
        arrays = {"w": shard.cut(whole, comm.rank)}
        if comm.rank and extent is None:
            arrays = {}
        extents = {"w": extent} if extent else {}
        return checkpoint.save(comm, folder, 1, arrays, {}, is_writer=True, extents=extents)

    return ThreadWorld(shard.n_ranks).run(body)[0]


@settings(max_examples=60)
@given(case=parameters())
def test_what_one_degree_writes_any_other_reads(tmp_path_factory, case):
    whole, written, wanted = case
    place = write(tmp_path_factory.mktemp("parts"), whole, written)
    np.testing.assert_array_equal(checkpoint.load(place)[0]["w"], whole)

    def body(comm):
        extent = Extent.of(wanted, comm.rank)
        found = checkpoint.load(place, ["w"], {"w": extent} if extent else {}, comm)[0]["w"]
        local = np.zeros(wanted.local_shape, found.dtype)
        local[extent.at() if extent else ...] = found
        np.testing.assert_array_equal(local, wanted.cut(whole, comm.rank))

    ThreadWorld(wanted.n_ranks).run(body)


def test_a_rank_reads_the_bytes_of_its_part_only(tmp_path, monkeypatch):
    """Rows 6 to 8 of three times 12, out of files that hold 4 rows of each."""
    whole = np.arange(36 * 5, dtype=np.float64).reshape(36, 5)
    place = write(tmp_path, whole, ShardedParameter((36, 5), 3, 0, (12, 12, 12)))
    n_bytes = []

    class Counting:
        def __init__(self, data):
            self.data = data

        def __getitem__(self, key):
            n_bytes.append(self.data[key].nbytes)
            return self.data[key]

    class File:
        def __init__(self, file):
            self.file = file

        def get_slice(self, name):
            return Counting(self.file.get_slice(name))

    opened = reader.Reader._open
    monkeypatch.setattr(reader.Reader, "_open", lambda self, file: File(opened(self, file)))
    wanted = Extent.of(ShardedParameter((36, 5), 4, 0, (12, 12, 12)), 2)
    found = checkpoint.load(place, extents={"w": wanted})[0]["w"]
    np.testing.assert_array_equal(found, whole[[6, 7, 8, 18, 19, 20, 30, 31, 32]])
    assert sum(n_bytes) == found.nbytes == 9 * 5 * 8


def test_what_does_not_fit_or_is_missing_is_refused(tmp_path):
    whole = np.zeros((8, 2))
    place = write(tmp_path / "a", whole, ShardedParameter((8, 2), 2, 0))
    with pytest.raises(CheckpointError, match=r"shape \(8, 2\), the model needs \(9, 2\)"):
        checkpoint.load(place, extents={"w": Extent.whole((9, 2), 0)})
    one = IdentityCommunicator()
    part = Extent((8, 2), 0, ((0, 3), (5, 8)))
    save = {"arrays": {"w": whole[:6]}, "state": {}, "extents": {"w": part}}
    lacking = checkpoint.save(one, tmp_path / "b", 1, **save)
    with pytest.raises(CheckpointError, match="lacks a part of w"):
        checkpoint.load(lacking)
    middle = Extent((8, 2), 0, ((5, 7),))
    assert checkpoint.load(lacking, extents={"w": middle})[0]["w"].shape == (2, 2)


def test_an_altered_file_is_told_to_all_ranks_whoever_finds_it(tmp_path):
    place = write(tmp_path, np.arange(12.0).reshape(6, 2), ShardedParameter((6, 2), 3, 0))
    file = place / "arrays-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    def body(comm):
        # Rank 0 needs only what another file holds.
        with pytest.raises(CheckpointError, match=r"arrays-1\.safetensors was altered"):
            checkpoint.load(place, ["w"], {"w": Extent((6, 2), 0, ((0, 1),))}, comm)

    ThreadWorld(2).run(body)


def test_what_one_rank_cannot_read_is_told_to_all(tmp_path):
    place = write(tmp_path, np.zeros((6, 2)), ShardedParameter((6, 2), 3, 0))

    def body(comm):
        shape = (7, 2) if comm.rank == 1 else (6, 2)
        with pytest.raises(CheckpointError, match=r"the model needs \(7, 2\)"):
            checkpoint.load(place, ["w"], {"w": Extent.whole(shape, 0)}, comm)

    ThreadWorld(2).run(body)


def test_a_checkpoint_of_the_first_format_is_read(tmp_path):
    """It lists the arrays of a file, all of them whole."""
    whole = np.arange(12.0).reshape(6, 2)
    place = write(tmp_path, whole, ShardedParameter((6, 2), 1, 0))
    index = checkpoint.store.json.loads((place / "index.json").read_text())
    index["format"] = 1
    for facts in index["files"].values():
        facts["arrays"] = list(facts["arrays"])
    index["blake2b"] = checkpoint.store._seal(index)
    (place / "index.json").write_text(checkpoint.store.json.dumps(index))
    np.testing.assert_array_equal(checkpoint.load(place)[0]["w"], whole)
    part = Extent((6, 2), 1, ((1, 2),))
    np.testing.assert_array_equal(checkpoint.load(place, extents={"w": part})[0]["w"], whole[:, 1:])
