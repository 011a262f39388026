"""Reading text, its bigram entropy, its cut, and the order in which rows come."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar import ThreadWorld
from mpipar.errors import EmptyInput, RecipeError, UnevenSplit
from mpipar.train.text import (
    Corpus,
    Sampler,
    bigram_entropy,
    read_text,
    share_text,
    standard_library,
)


def as_bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


# -- entropy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "entropy"),
    [
        ("abababab", 0.0),  # each byte tells the next
        ("aab", math.log(2)),  # after a: a or b
        ("aabaacaad", 6 / 8 * (0.5 * math.log(2) + 0.5 * math.log(6))),
        ("abacabacabacab", 7 / 13 * (4 / 7 * math.log(7 / 4) + 3 / 7 * math.log(7 / 3))),
    ],
)
def test_bigram_entropy_by_hand(text, entropy):
    """aabaacaad: from a come a a a (3 of 6) and b, c, d (1 of 6 each); from b and c always a."""
    assert bigram_entropy(as_bytes(text)) == pytest.approx(entropy, rel=1e-14, abs=1e-15)


@given(st.binary(min_size=2, max_size=400), st.integers(1, 50))
def test_bigram_entropy_by_counting(data, chunk):
    import mpipar.train.text as module

    counts, firsts = {}, {}
    for pair in pairwise(data):
        counts[pair] = counts.get(pair, 0) + 1
        firsts[pair[0]] = firsts.get(pair[0], 0) + 1
    n = len(data) - 1
    expected = -sum(c / n * math.log(c / firsts[a]) for (a, _), c in counts.items())
    old, module._CHUNK = module._CHUNK, chunk  # the count is made in pieces
    try:
        found = bigram_entropy(np.frombuffer(data, np.uint8))
    finally:
        module._CHUNK = old
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(st.binary(min_size=2, max_size=400))
def test_tokens_have_the_entropy_of_equal_bytes(data):
    text = np.frombuffer(data, np.uint8)
    other = text.astype(np.int32) * 190 + 7  # the same pairs in a larger vocabulary
    assert bigram_entropy(other) == pytest.approx(bigram_entropy(text), rel=1e-12, abs=1e-12)


def test_tokens_are_read_from_an_array_and_shared(tmp_path):
    path, tokens = tmp_path / "a.npy", np.arange(50_000, dtype=">u4")
    np.save(path, tokens)
    found = ThreadWorld(3).run(lambda comm: share_text(comm, str(path)))
    for text in found:
        assert text.dtype == np.dtype("<i4")
        np.testing.assert_array_equal(text, tokens)
    rows = Sampler(found[0], 8, 0).rows(0, 3)
    assert (np.diff(rows) == 1).all()
    assert rows.max() > 255


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.ones(3), "holds float64 of shape"),
        (np.ones((2, 2), int), "whole numbers in one dim"),
        (np.array([3, -1]), "below 0"),
        (np.array([2**31]), "above 2147483647"),
    ],
)
def test_other_arrays_are_refused(tmp_path, array, says):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(RecipeError, match=says):
        read_text(str(tmp_path / "a.npy"))
    (tmp_path / "a.npy").write_bytes(b"no array")
    with pytest.raises(RecipeError, match="cannot be read as an array"):
        read_text(str(tmp_path / "a.npy"))
    np.save(tmp_path / "a.npy", np.array([], int))
    with pytest.raises(EmptyInput, match="no tokens"):
        read_text(str(tmp_path / "a.npy"))


def test_one_byte_has_no_bigram():
    with pytest.raises(EmptyInput, match="1 bytes have no bigram"):
        bigram_entropy(as_bytes("a"))


# -- the cut ---------------------------------------------------------------------------------

BLOCK = 16384


def test_every_kth_block_is_held_out():
    n_blocks = 9
    text = np.repeat(np.arange(n_blocks, dtype=np.uint8), BLOCK)[: 8 * BLOCK + 5]
    corpus = Corpus.cut(text, 0.25)
    assert np.unique(corpus.held_out).tolist() == [3, 7]
    assert np.unique(corpus.train).tolist() == [0, 1, 2, 4, 5, 6, 8]
    assert corpus.held_out.size == 2 * BLOCK
    assert corpus.train.size + corpus.held_out.size == text.size


@given(st.binary(min_size=3, max_size=2000), st.floats(0.01, 0.9))
def test_a_short_text_is_cut_once_near_its_end(data, held_out):
    corpus = Corpus.cut(np.frombuffer(data, np.uint8), held_out)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == data
    assert min(corpus.train.size, corpus.held_out.size) >= 1
    assert abs(corpus.held_out.size - held_out * len(data)) <= 1


def test_the_digest_is_of_the_whole_text():
    digests = {Corpus.cut(as_bytes(t), 0.1).digest for t in ("a" * 50, "a" * 49 + "b", "b" * 50)}
    assert len(digests) == 3
    assert Corpus.cut(as_bytes("a" * 50), 0.5).digest in digests


# -- reading ---------------------------------------------------------------------------------


def test_a_folder_is_read_in_order_without_what_is_hidden(tmp_path):
    for name in ("b.txt", "a/z.txt", ".hidden", ".git/config", "a/.x/y"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(f"<{name}>")
    assert read_text(str(tmp_path)).tobytes() == b"<a/z.txt><b.txt>"
    assert read_text(str(tmp_path / "b.txt")).tobytes() == b"<b.txt>"
    assert read_text(str(tmp_path / ".git")).tobytes() == b"<.git/config>"  # asked for by name


def test_the_standard_library_is_large_and_has_no_tests():
    files = standard_library()
    assert files == sorted(files)
    assert sum(f.stat().st_size for f in files) > 5_000_000
    assert not any({"test", "tests", "site-packages"} & set(f.parts[-3:]) for f in files)


def test_all_ranks_get_the_text_that_rank_0_reads(tmp_path):
    path = tmp_path / "text"
    path.write_text("some text")
    readings = []

    def body(comm):
        place = str(path) if comm.rank == 0 else "/absent"
        readings.append(comm.rank)
        return share_text(comm, place).tobytes()

    assert ThreadWorld(3).run(body) == [b"some text"] * 3


@pytest.mark.parametrize("kind", ["absent", "empty", "empty folder"])
def test_all_ranks_learn_why_rank_0_cannot_read(tmp_path, kind):
    path = tmp_path / "text"
    if kind == "empty":
        path.touch()
    elif kind == "empty folder":
        path.mkdir()
    error = RecipeError if kind == "absent" else EmptyInput

    def body(comm):
        with pytest.raises(error, match=r"neither a file nor a folder|no bytes in"):
            share_text(comm, str(path))

    ThreadWorld(3).run(body)


# -- the order of rows -------------------------------------------------------------------------


@given(st.integers(2, 90), st.integers(1, 9), st.integers(0, 3), st.integers(1, 40))
def test_every_epoch_visits_every_row_once(size, sequence, seed, batch):
    if size <= sequence:
        size += sequence
    sampler = Sampler(np.arange(size, dtype=np.uint8), sequence, seed)
    n = (size - 1) // sequence
    assert sampler.n_rows == n
    starts = []
    for step in range(-(-3 * n // batch)):
        rows = sampler.rows(step * batch, (step + 1) * batch)
        assert rows.shape == (batch, sequence + 1)
        assert rows.dtype == np.int64
        np.testing.assert_array_equal(np.diff(rows, axis=1), 1)  # neighbours in the text
        starts += rows[:, 0].tolist()
    for epoch in range(3):
        found = starts[epoch * n : (epoch + 1) * n]
        assert sorted(found) == [i * sequence for i in range(n)]


@given(st.integers(0, 200), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_the_batch_at_a_position_is_the_same_for_any_number_of_ranks(start, dp):
    """Also across the end of an epoch, by samplers that have never seen the start."""
    text = np.random.default_rng(0).integers(0, 256, 200).astype(np.uint8)
    whole = Sampler(text, 5, seed=3).rows(start, start + 12)
    share = 12 // dp
    parts = [
        Sampler(text, 5, seed=3).rows(start + r * share, start + (r + 1) * share) for r in range(dp)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_epochs_and_seeds_differ():
    text = np.arange(101, dtype=np.uint8)
    a, b = Sampler(text, 1, 0), Sampler(text, 1, 1)
    assert a.rows(0, 100).tolist() != a.rows(100, 200).tolist()
    assert a.rows(0, 100).tolist() != b.rows(0, 100).tolist()
    assert a.rows(0, 100).tolist() == Sampler(text, 1, 0).rows(0, 100).tolist()


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(UnevenSplit, match=r"5 bytes hold no row of 5 tokens .* sequence=4 at most"):
        Sampler(as_bytes("abcde"), 5, 0)
