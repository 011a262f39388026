"""Checkpoints that are complete or not there, and models of other tools."""

from mpipar.checkpoint.extent import Extent
from mpipar.checkpoint.hf import export_hf
from mpipar.checkpoint.newest import Newest, load_newest, newest
from mpipar.checkpoint.pretrained import Pretrained, open_pretrained
from mpipar.checkpoint.saver import Saver
from mpipar.checkpoint.store import load, save

__all__ = [
    "Extent",
    "Newest",
    "Pretrained",
    "Saver",
    "export_hf",
    "load",
    "load_newest",
    "newest",
    "open_pretrained",
    "save",
]
