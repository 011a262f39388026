"""The acting half: a global array of which each rank holds its shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpipar.comm.targets import dtype_name, named_dtype
from mpipar.errors import EmptyInput, LayoutError
from mpipar.mesh import Mesh, MeshLayout
from mpipar.sharding.node_memory import local_empty
from mpipar.sharding.plan import Kind, Plan, Step, messages_between, plan_redistribution
from mpipar.sharding.redistribute import exchange, run_plan
from mpipar.sharding.sharding import ArraySpec, Boxes, Sharding
from mpipar.sharding.transfer import Transfer, extent

Array = NDArray[Any]


class ShardedArray:
    """A global array on a mesh; shape, dtype and owner of every element are known on every rank.

    Parameters
    ----------
    local : ndarray
        This rank's shard.
    mesh : Mesh
        The ranks.
    sharding : Sharding or str
        How the array lies on them; text such as ``"A[I_dp, J_tp]"``.
    shape : tuple of int, optional
        Of the global array. Without it the ranks tell each other their shapes: *collective*, and a
        shard that does not fit is refused on every rank.

    Raises
    ------
    LayoutError
        If `local` is not the shard that the sharding gives this rank.

    Examples
    --------
    >>> from mpipar.comm import ThreadWorld
    >>> def body(world):
    ...     with Mesh(world, tp=2) as mesh:
    ...         a = ShardedArray.from_global(np.arange(6).reshape(2, 3), mesh, "A[I, J_tp]")
    ...         return a.local.tolist(), a.redistribute("A[I_tp, J]").local.tolist()
    >>> ThreadWorld(2).run(body)
    [([[0, 1], [3, 4]], [[0, 1, 2]]), ([[2], [5]], [[3, 4, 5]])]
    """

    def __init__(
        self,
        local: Array,
        mesh: Mesh,
        sharding: Sharding | str,
        shape: Sequence[int] | None = None,
    ) -> None:
        self.local = np.asarray(local)
        self.mesh = mesh
        sharding = _sharding(sharding)
        if shape is None:
            self.spec = _agreed(self.local, mesh, sharding)
            return
        self.spec = ArraySpec(tuple(shape), self.local.dtype, mesh.layout, sharding)
        expected = self.spec.local_shape(mesh.rank)
        if self.local.shape != expected:
            raise LayoutError(
                f"rank {mesh.rank} of {self.spec} holds shape {expected}, got {self.local.shape}"
            )

    # -- how one is made --------------------------------------------------------------------

    @classmethod
    def from_global(
        cls, array: Any, mesh: Mesh, sharding: Sharding | str, root: int | None = None
    ) -> ShardedArray:
        """Cut a global array.

        Parameters
        ----------
        array : array-like
            The same on every rank; with `root`, needed there only.
        mesh : Mesh
            The ranks.
        sharding : Sharding or str
            How it is to lie.
        root : int, optional
            Who has it; then collective, and every element of a shard is sent once.

        Returns
        -------
        ShardedArray
            Owns its shard.
        """
        sharding = _sharding(sharding)
        if root is None:
            whole = np.asarray(array)
            spec = ArraySpec(whole.shape, whole.dtype, mesh.layout, sharding)
            local = local_empty(mesh.world, spec, mesh.rank)
            local[...] = whole[spec.slices(mesh.rank)]
        else:
            spec = _announced(array, mesh, sharding, root)
            local = _scattered(array, mesh, spec, root)
        return cls(_spread(local, spec, mesh), mesh, sharding, spec.shape)

    @classmethod
    def from_function(
        cls,
        function: Callable[[tuple[slice, ...]], Any],
        shape: Sequence[int],
        mesh: Mesh,
        sharding: Sharding | str,
        dtype: DTypeLike = np.float64,
    ) -> ShardedArray:
        """Make each shard where it belongs; no rank ever holds the whole, nothing is sent.

        Parameters
        ----------
        function : callable
            Gets this rank's slices of the global array, returns what broadcasts to their shape;
            called once. Replicas call it with the same slices and must get the same values.
        shape : sequence of int
            Of the global array.
        mesh : Mesh
            The ranks.
        sharding : Sharding or str
            How it lies.
        dtype : dtype
            Of the array.

        Returns
        -------
        ShardedArray
            Owns its shard.
        """
        spec = ArraySpec(tuple(shape), np.dtype(dtype), mesh.layout, _sharding(sharding))
        local = local_empty(mesh.world, spec, mesh.rank)
        local[...] = function(spec.slices(mesh.rank))
        return cls(_spread(local, spec, mesh), mesh, spec.sharding, spec.shape)

    # -- what is known about it -------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the global array."""
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self.spec.dtype

    @property
    def sharding(self) -> Sharding:
        """How it lies on the mesh."""
        return self.spec.sharding

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part of the global array that this rank holds."""
        return self.spec.slices(self.mesh.rank)

    def local_index(self, *index: int) -> tuple[int, ...] | None:
        """Where an element of the global array lies in `local`.

        Parameters
        ----------
        *index : int
            Global index.

        Returns
        -------
        tuple of int or None
            None where this rank does not hold it.
        """
        if self.mesh.rank not in self.spec.owners(*index):
            return None
        return tuple(i - s.start for i, s in zip(index, self.slices, strict=True))

    def global_index(self, *index: int) -> tuple[int, ...]:
        """Where an element of `local` lies in the global array.

        Parameters
        ----------
        *index : int
            Local index, each number of 0 or more.

        Returns
        -------
        tuple of int
            Global index.
        """
        local = self.local.shape
        fits = len(index) == len(local)
        if not fits or not all(0 <= i < n for i, n in zip(index, local, strict=True)):
            raise LayoutError(f"no element {index} in a shard of shape {local}")
        return tuple(i + s.start for i, s in zip(index, self.slices, strict=True))

    def __repr__(self) -> str:
        return f"ShardedArray({self.spec}; rank {self.mesh.rank} holds {self.local.shape})"

    # -- how it moves -----------------------------------------------------------------------

    def plan(self, sharding: Sharding | str, mesh: Mesh | None = None) -> Plan:
        """What `redistribute` would do. Sends nothing.

        Parameters
        ----------
        sharding, mesh
            As in `redistribute`.

        Returns
        -------
        Plan
            Its text tells the steps and their bytes.
        """
        return _planned(self.spec, _sharding(sharding), (mesh or self.mesh).layout)

    def redistribute(
        self,
        sharding: Sharding | str,
        mesh: Mesh | None = None,
        out: ShardedArray | None = None,
    ) -> ShardedArray:
        """The same global array laid out otherwise. Collective over the mesh.

        Parameters
        ----------
        sharding : Sharding or str
            How it is to lie; a partial array is reduced where the new sharding is not partial.
        mesh : Mesh, optional
            Another mesh over the same communicator.
        out : ShardedArray, optional
            An array of that description, such as an earlier result, whose memory is written.

        Returns
        -------
        ShardedArray
            `out`, or a new one, which shares its memory with this one only where nothing was to be
            done.

        Notes
        -----
        Cost: the least bytes possible, what each rank wants less what it has; see `plan`.
        """
        mesh = mesh or self.mesh
        if mesh.world is not self.mesh.world:
            raise LayoutError("both meshes must be made over the same communicator")
        plan = self.plan(sharding, mesh)
        if out is not None:
            out.check_target(plan.target, self.local)
        local = run_plan(plan, self.local, self.mesh, None if out is None else out.local)
        return out or ShardedArray(local, mesh, plan.target.sharding, self.shape)

    def check_target(self, spec: ArraySpec, source: Array) -> None:
        """Refuse to be the `out` of a result that this array cannot take.

        Parameters
        ----------
        spec : ArraySpec
            Of the result.
        source : ndarray
            What is read meanwhile.

        Raises
        ------
        LayoutError
            If descriptions differ or the memory does not do.
        """
        if self.spec != spec:
            raise LayoutError(f"out is {self.spec}; the result is {spec}")
        if not self.local.flags.carray or np.may_share_memory(self.local, source):
            raise LayoutError("out must be writable and C-contiguous, in memory of its own")

    def to_global(self, root: int | None = None) -> Array | None:
        """The whole array, values reduced. Collective over the mesh.

        Parameters
        ----------
        root : int, optional
            Only this rank gets it.

        Returns
        -------
        ndarray or None
            An array of its own; None on ranks other than `root`.
        """
        nothing = Sharding(((),) * len(self.shape))
        if root is None or not self.shape:
            whole = self.redistribute(nothing).local
            whole = whole.copy() if whole is self.local else whole
            return whole if root in (None, self.mesh.rank) else None
        self.spec.slices(root)  # refuses a rank that does not exist
        source = self.redistribute(self.sharding.without_partial())
        have = source.spec.boxes
        want = np.zeros_like(have)
        want[root, :, 1] = self.shape
        whole = _moved(self.mesh, source.local, have, want)
        return whole if self.mesh.rank == root else None


_parsed = lru_cache(maxsize=256)(Sharding.parse)


def _sharding(sharding: Sharding | str) -> Sharding:
    return _parsed(sharding) if isinstance(sharding, str) else sharding


@lru_cache(maxsize=256)
def _planned(spec: ArraySpec, sharding: Sharding, layout: MeshLayout) -> Plan:
    return plan_redistribution(spec, spec.with_sharding(sharding, layout))


def _spread(local: Array, spec: ArraySpec, mesh: Mesh) -> Array:
    """From values to the terms of a partial array; nothing is sent."""
    if not spec.partial:
        return local
    whole = spec.with_sharding(spec.sharding.without_partial())
    step = Step(Kind.FILL, whole, spec, spec.partial)
    return run_plan(Plan(whole, spec, (step,)), local, mesh)


def _agreed(local: Array, mesh: Mesh, sharding: Sharding) -> ArraySpec:
    """The description that all shards fit, found from their shapes."""
    dtype = dtype_name(local.dtype)
    told = mesh.world.all_gather_json([list(local.shape), dtype, str(sharding)])
    shapes = [tuple(row[0]) for row in told]
    if any(row[1:] != told[0][1:] or len(row[0]) != local.ndim for row in told):
        raise LayoutError(f"the ranks hold different dims, dtypes or shardings: {told}")
    ArraySpec((0,) * local.ndim, local.dtype, mesh.layout, sharding)
    shape = tuple(
        sum(shapes[rank][dim] for rank in mesh.layout.ranks(0, *axes))
        for dim, axes in enumerate(sharding.dims)
    )
    spec = ArraySpec(shape, local.dtype, mesh.layout, sharding)
    for rank, held in enumerate(shapes):
        if held != spec.local_shape(rank):
            expected = spec.local_shape(rank)
            raise LayoutError(f"rank {rank} of {spec} holds shape {expected}, got {held}")
    return spec


def _announced(array: Any, mesh: Mesh, sharding: Sharding, root: int) -> ArraySpec:
    def announce() -> list[Any]:
        if array is None:
            raise EmptyInput("from_global", f"rank {root} is the root and gave no array")
        whole = np.asarray(array)
        ArraySpec(whole.shape, whole.dtype, mesh.layout, sharding)
        return [list(whole.shape), dtype_name(whole.dtype)]

    shape, dtype = mesh.world.made_by_root(announce, root)
    return ArraySpec(tuple(shape), named_dtype(dtype), mesh.layout, sharding)


def _scattered(array: Any, mesh: Mesh, spec: ArraySpec, root: int) -> Array:
    world, me = mesh.world, mesh.rank
    if not any(spec.sharding.dims):
        whole = np.asarray(array) if me == root else np.empty(spec.shape, spec.dtype)
        return np.asarray(world.broadcast(whole, root))
    have = np.zeros_like(spec.boxes)
    have[root, :, 1] = spec.shape
    local = np.asarray(array) if me == root else np.empty((0,) * len(spec.shape), spec.dtype)
    return _moved(mesh, local, have, spec.boxes)


def _moved(mesh: Mesh, x: Array, have: Boxes, want: Boxes) -> Array:
    """Values of any boxes over the whole world."""
    world = mesh.world
    out = np.empty(extent(want[mesh.rank]), x.dtype)
    moves = messages_between(have, want)
    exchange(world, x, Transfer(have, want, moves, range(world.size), world.rank), out)
    return out
