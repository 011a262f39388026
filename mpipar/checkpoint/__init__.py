"""Checkpoints that are complete or not there, and models of other tools."""

from mpipar.checkpoint.extent import Extent
from mpipar.checkpoint.hf import export_hf
from mpipar.checkpoint.pretrained import Pretrained, open_pretrained
from mpipar.checkpoint.saver import Saver
from mpipar.checkpoint.store import load, newest, save

__all__ = [
    "Extent",
    "Pretrained",
    "Saver",
    "export_hf",
    "load",
    "newest",
    "open_pretrained",
    "save",
]
