"""Collectives of one process over N devices, as operations of the lazy graph.

Shard i lives on device i and the first device is the leader. Fewer shards than devices use the
first devices only. B is the bytes of one shard, n the number of shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpipar.comm.call import Array, ReduceOp
from mpipar.device_group.device import HOST, Device
from mpipar.device_group.join import check_alike, combine, concatenate
from mpipar.device_group.lazy import Graph, LazyArray
from mpipar.device_group.run import realize
from mpipar.errors import CountOutOfRange, EmptyInput, LayoutError, UnsupportedArray
from mpipar.units.remainder import spread_range

SUM = ReduceOp.SUM


class DeviceGroup:
    """Devices in rank order.

    Parameters
    ----------
    devices : sequence of Device
        At least one; a device may stand there more than once.
    graph : Graph, optional
        Shared between groups whose arrays meet; a new one by default.

    Raises
    ------
    EmptyInput
        Without a device.
    LayoutError
        If two devices have one name.
    """

    def __init__(self, devices: Sequence[Device], graph: Graph | None = None) -> None:
        self.devices = tuple(devices)
        self.graph = graph if graph is not None else Graph()
        if not self.devices:
            raise EmptyInput("device group", "got no devices; at least 1 is needed")
        named = {device.name: device for device in self.devices}
        for device in self.devices:
            if named[device.name] is not device or device.name == HOST:
                raise LayoutError(f"device group: the name {device.name!r} is taken; give another")

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def leader(self) -> Device:
        """The first device."""
        return self.devices[0]

    def put(self, values: Any, rank: int = 0) -> LazyArray:
        """Copy values to one device.

        Parameters
        ----------
        values : array-like
            Numbers.
        rank : int
            Which device.

        Returns
        -------
        LazyArray
            On that device.
        """
        return self.graph.constant(values, self._device(rank))

    def realize(self, shards: Sequence[LazyArray]) -> list[Array]:
        """Compute shards in one run and copy them to the host.

        Parameters
        ----------
        shards : sequence of LazyArray
            Any arrays.

        Returns
        -------
        list of ndarray
            In the same order.
        """
        realize(*shards)
        return [shard.numpy() for shard in shards]

    def reduce(self, shards: Sequence[LazyArray], op: ReduceOp = SUM) -> LazyArray:
        """Reduce to the leader.

        Parameters
        ----------
        shards : sequence of LazyArray
            One a device, alike in shape and dtype.
        op : ReduceOp
            Not a location form.

        Returns
        -------
        LazyArray
            On the leader, reduced in rank order. Cost: (n-1) B in all.
        """
        self._check(shards)
        return combine([shard.to(self.leader) for shard in shards], op)

    def all_reduce(self, shards: Sequence[LazyArray], op: ReduceOp = SUM) -> list[LazyArray]:
        """Reduce, and give every device the result.

        Parameters
        ----------
        shards, op
            As in `reduce`.

        Returns
        -------
        list of LazyArray
            One a device: each reduces one slice and hands it to the others. Cost: 2 (n-1) B in
            all, 2 (n-1)/n B sent a device where the slices are equal.
        """
        self._check(shards)
        check_alike(shards, str(op))
        slices = self.reduce_scatter([shard.reshape(shard.size) for shard in shards], op)
        return [whole.reshape(*shards[0].shape) for whole in self.all_gather(slices)]

    def reduce_scatter(
        self, shards: Sequence[LazyArray], op: ReduceOp = SUM, dim: int = 0
    ) -> list[LazyArray]:
        """Reduce, and leave the i-th block along `dim` on device i.

        Parameters
        ----------
        shards, op
            As in `reduce`.
        dim : int
            Dim that is cut; the first devices take one more.

        Returns
        -------
        list of LazyArray
            One block a device. Cost: (n-1) B in all.
        """
        blocks = self._blocks(shards, dim)
        return [combine(column, op) for column in blocks]

    def gather(self, shards: Sequence[LazyArray], dim: int = 0) -> LazyArray:
        """Join on the leader.

        Parameters
        ----------
        shards : sequence of LazyArray
            One a device, alike but along `dim`.
        dim : int
            Along which.

        Returns
        -------
        LazyArray
            On the leader. Cost: the bytes of all shards but the first.
        """
        self._check(shards)
        return concatenate([shard.to(self.leader) for shard in shards], dim)

    def all_gather(self, shards: Sequence[LazyArray], dim: int = 0) -> list[LazyArray]:
        """Join on every device.

        Parameters
        ----------
        shards, dim
            As in `gather`.

        Returns
        -------
        list of LazyArray
            One a device. Cost: n - 1 times the bytes of all shards.
        """
        self._check(shards)
        targets = self.devices[: len(shards)]
        return [concatenate([shard.to(device) for shard in shards], dim) for device in targets]

    def all_to_all(self, shards: Sequence[LazyArray], dim: int = 0) -> list[LazyArray]:
        """Send block j of shard i to device j, and join there what comes, in rank order.

        Parameters
        ----------
        shards : sequence of LazyArray
            One a device, alike but along `dim`.
        dim : int
            Dim that is cut (the first devices take one more) and joined.

        Returns
        -------
        list of LazyArray
            One a device. Cost: (n-1) B in all where the blocks are equal.
        """
        return [concatenate(column, dim) for column in self._blocks(shards, dim)]

    def broadcast(self, x: LazyArray, root: int = 0) -> list[LazyArray]:
        """Give every device the array of one.

        Parameters
        ----------
        x : LazyArray
            On device `root`.
        root : int
            Whose array it is.

        Returns
        -------
        list of LazyArray
            One a device. Cost: (n-1) B in all.
        """
        self._check_root(x, root)
        return [x.to(device) for device in self.devices]

    def scatter(self, x: LazyArray, root: int = 0, dim: int = 0) -> list[LazyArray]:
        """Give device i the i-th block of the array of one.

        Parameters
        ----------
        x : LazyArray
            On device `root`.
        root : int
            Whose array is cut.
        dim : int
            Dim that is cut; the first devices take one more.

        Returns
        -------
        list of LazyArray
            One block a device. Cost: (n-1)/n B in all.
        """
        self._check_root(x, root)
        extent = x.shape[x.dim(dim)]
        return [
            x.block(dim, *spread_range(extent, self.size, i)).to(device)
            for i, device in enumerate(self.devices)
        ]

    def _blocks(self, shards: Sequence[LazyArray], dim: int) -> list[list[LazyArray]]:
        """For each device the blocks that belong there, in rank order."""
        self._check(shards)
        n = len(shards)
        extents = [shard.shape[shard.dim(dim)] for shard in shards]
        return [
            [s.block(dim, *spread_range(e, n, i)).to(self.devices[i])
             for s, e in zip(shards, extents, strict=True)]
            for i in range(n)
        ]  # fmt: skip

    def _device(self, rank: int) -> Device:
        if not 0 <= rank < self.size:
            raise CountOutOfRange("rank of a device group", f"0..{self.size - 1}", rank)
        return self.devices[rank]

    def _check_root(self, x: LazyArray, root: int) -> None:
        if x.device is not self._device(root):
            raise LayoutError(
                f"the array of root {root} is on {x.device.name}, not on "
                f"{self.devices[root].name}; copy it with .to(device)"
            )

    def _check(self, shards: Sequence[Any]) -> None:
        if not shards:
            raise EmptyInput("collective of a device group", "got no shards; at least 1 is needed")
        if len(shards) > self.size:
            raise LayoutError(
                f"{len(shards)} shards for {self.size} devices; at most {self.size} would do"
            )
        for i, shard in enumerate(shards):
            if not isinstance(shard, LazyArray):
                raise UnsupportedArray(
                    f"shard {i} is a {type(shard).__name__}; make it with put(values, {i})"
                )
            if shard.graph is not shards[0].graph:
                raise LayoutError(
                    f"shards 0 and {i} belong to different graphs; make both with one group, or "
                    "give the groups one graph: DeviceGroup(devices, graph=other.graph)"
                )
            if shard.device is not self.devices[i]:
                raise LayoutError(
                    f"shard {i} is on {shard.device.name}, device {i} is {self.devices[i].name}; "
                    "copy it with .to(device)"
                )
