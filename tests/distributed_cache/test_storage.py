"""Blocks of keys and values: what is written is read, in every layout."""

import numpy as np
import pytest

from mpipar.distributed_cache.layout import CacheLayout, Piece
from mpipar.distributed_cache.storage import CacheStorage
from mpipar.errors import CacheError, CountOutOfRange

LAYOUT = CacheLayout((2, 5), (1, 3), head_dim=3, block_size=4, dtype="float64")


def values_of(tokens: range, layer: int, head: int) -> np.ndarray:
    """What an element encodes: layer, head, token and dim, in digits."""
    return np.array([[layer * 1e6 + head * 1e4 + t * 10 + d for d in range(3)] for t in tokens])


def filled(blocks: list[int], n_tokens: int) -> CacheStorage:
    """A storage with one sequence, written token by token."""
    storage = CacheStorage(LAYOUT, 8)
    for layer in range(2, 5):
        for token in range(n_tokens):
            one = np.stack([values_of(range(token, token + 1), layer, h) for h in (1, 2)], 1)
            storage.write(layer, [blocks[token // 4]], [token % 4], one, -one)
    return storage


def test_bytes_are_those_of_the_formula() -> None:
    storage = CacheStorage(LAYOUT, 8)
    assert storage.n_bytes == LAYOUT.n_bytes(8) == 8 * 3 * 2 * 2 * 4 * 3 * 8
    assert storage.data.shape == (8, 3, 2, 2, 4, 3)


@pytest.mark.parametrize("blocks", [[5, 6, 7], [3, 0, 1], [7, 5, 3]])
@pytest.mark.parametrize("n_tokens", [9, 12])
def test_a_sequence_is_read_as_it_was_written(blocks: list[int], n_tokens: int) -> None:
    storage = filled(blocks, n_tokens)
    out = np.full((2, 2, 12, 3), 7.0)
    for layer in (2, 4):
        for given in (None, out):
            keys, values = storage.read(layer, blocks, n_tokens, out=given)
            assert keys.shape == (2, n_tokens, 3)
            for place, head in enumerate((1, 2)):
                np.testing.assert_array_equal(keys[place], values_of(range(n_tokens), layer, head))
            np.testing.assert_array_equal(values, -keys)
            assert given is None or np.shares_memory(keys, out)


def test_many_sequences_are_written_in_one_call_and_one_block_is_not_copied() -> None:
    storage = CacheStorage(LAYOUT, 8)
    keys = np.arange(3 * 2 * 3.0).reshape(3, 2, 3)
    storage.write(3, [4, 1, 4], [0, 3, 1], keys, 2 * keys)
    got, doubled = storage.read(3, [4], 2)
    np.testing.assert_array_equal(got, keys[[0, 2]].transpose(1, 0, 2))
    np.testing.assert_array_equal(doubled, 2 * got)
    assert np.shares_memory(got, storage.data)
    np.testing.assert_array_equal(storage.data[1, 1, 0, :, 3], keys[1])
    assert not storage.data[:, [0, 2]].any()


def test_copy_on_write_copies_all_layers_once() -> None:
    storage = filled([0, 1], 8)
    storage.copy([1], [6])
    np.testing.assert_array_equal(storage.data[6], storage.data[1])
    storage.write(2, [6], [0], np.zeros((1, 2, 3)), np.zeros((1, 2, 3)))
    assert storage.read(2, [1], 1)[0].all()
    with pytest.raises(CacheError, match="cannot be copied"):
        storage.copy([1, 2], [2, 3])


def test_boxes_pass_between_block_sizes() -> None:
    source = filled([3, 0, 5], 11)
    other = CacheStorage(CacheLayout((3, 5), (2, 3), 3, block_size=5, dtype="float64"), 4)
    piece = Piece(0, 0, (3, 5), (2, 3), (2, 11), 0)
    box = source.get_box([3, 0, 5], piece)
    assert box.shape == (2, 2, 1, 9, 3)
    assert box.flags.c_contiguous
    other.put_box([2, 0, 1], piece, box)
    for layer in (3, 4):
        keys, _ = other.read(layer, [2, 0, 1], 11)
        np.testing.assert_array_equal(keys[0, 2:], values_of(range(2, 11), layer, 2))
        assert not keys[0, :2].any()


def test_what_does_not_lie_here_is_refused() -> None:
    storage = CacheStorage(LAYOUT, 8)
    with pytest.raises(CountOutOfRange, match=r"2\.\.5, got 1"):
        storage.read(1, [0], 1)
    with pytest.raises(CacheError, match="5 tokens do not lie in 1 blocks"):
        storage.read(2, [0], 5)
    with pytest.raises(CacheError, match=r"KV heads 0\.\.2"):
        storage.get_box([0], Piece(0, 0, (2, 3), (0, 2), (0, 1), 0))
    with pytest.raises(CountOutOfRange):
        CacheStorage(LAYOUT, 0)
