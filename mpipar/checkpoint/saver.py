"""Checkpoints that are written while the training goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mpipar.checkpoint import store
from mpipar.checkpoint.extent import Extent
from mpipar.comm import Communicator, ReduceOp, Request
from mpipar.errors import CheckpointError

Array = NDArray[Any]
_LONGEST_S = 3600.0


class Saver:
    """Writes one checkpoint at a time in a thread of its own. Collective to make.

    The thread does no MPI. When every rank has written its file, rank 0 writes the index and gives
    the folder its name, in `poll` or `finish`; until then the checkpoint before is the newest.

    Parameters
    ----------
    comm : Communicator
        All ranks; they see one file system.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = cast(Communicator, comm.split(0, purpose="checkpoints in the background"))
        self._thread: threading.Thread | None = None
        self._request: Request | None = None
        self._job: dict[str, Any] = {}
        self._problem: Exception | None = None

    def begin(
        self,
        folder: Path,
        step: int,
        arrays: Mapping[str, Array],
        state: Mapping[str, Any],
        keep: int = 2,
        is_writer: bool | None = None,
        extents: Mapping[str, Extent] | None = None,
    ) -> None:
        """Copy the arrays and start to write them; the one before is finished first. Collective.

        Parameters
        ----------
        folder, step, arrays, state, keep, is_writer, extents
            As in `save`; the arrays may be changed as soon as this returns.

        Raises
        ------
        CheckpointError
            On every rank, if the checkpoint before could not be written.
        """
        self.finish()
        scratch = store.prepare(self._comm, folder, step)
        writes = self._comm.rank == 0 if is_writer is None else is_writer
        parts = extents or {}
        copies = {n: np.array(a if n not in parts else a[parts[n].at()]) for n, a in arrays.items()}
        held = {name: parts.get(name) for name in copies}
        file = scratch / f"arrays-{self._comm.rank}.safetensors"
        self._job = {"folder": folder, "step": step, "state": dict(state), "keep": keep}
        self._problem = None
        self._thread = threading.Thread(
            target=self._write, args=(file, copies if writes else {}, held), daemon=True
        )
        self._thread.start()

    def _write(
        self, file: Path, arrays: Mapping[str, Array], held: Mapping[str, Extent | None]
    ) -> None:
        try:
            facts = store.write(file, arrays, held) if arrays else {}
            file.with_suffix(".json").write_text(json.dumps(facts), encoding="utf-8")
        except Exception as error:
            self._problem = error

    def poll(self) -> bool:
        """Go on without waiting: to be called now and then by every rank, at any pace.

        Returns
        -------
        bool
            Whether nothing is under way.
        """
        if self._thread is None:
            return True
        if self._request is None:
            if self._thread.is_alive():
                return False
            is_good = np.array(self._problem is None)
            self._request = self._comm.begin_all_reduce(is_good, ReduceOp.MIN)
        if not self._request.test():
            return False
        good, self._thread, self._request = self._request.wait(), None, None
        if good and self._comm.rank == 0:
            try:
                self._publish()
            except Exception as error:
                self._problem = error
        return True

    def _publish(self) -> None:
        job = self._job
        scratch = store.scratch_of(job["folder"], job["step"])
        files: dict[str, Any] = {}
        for rank in range(self._comm.size):
            facts = scratch / f"arrays-{rank}.json"
            files.update(json.loads(facts.read_text(encoding="utf-8")))
            facts.unlink()
        store.publish(job["folder"], job["step"], job["state"], files, job["keep"])

    def finish(self) -> None:
        """Wait until the checkpoint under way is whole. Collective.

        Raises
        ------
        CheckpointError
            On every rank, if it could not be written; older ones are untouched then.
        """
        if not self._job:
            return
        if self._thread is not None:
            self._thread.join(_LONGEST_S)
            if self._thread.is_alive():
                self._problem = TimeoutError(f"not written within {_LONGEST_S:g} s")
                self._thread = None
            else:
                self.poll()
                if self._request is not None:
                    self._request.wait()
                self.poll()
        place, problem = store.folder_of(self._job["folder"], self._job["step"]), self._problem
        self._job, self._problem = {}, None
        self._comm.all_gather_json(
            problem and CheckpointError(f"checkpoint {place} could not be written: {problem}")
        )

    def close(self) -> None:
        """Finish, and release the group. Collective."""
        self.finish()
        self._comm.close()
