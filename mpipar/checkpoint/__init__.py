"""Checkpoints that are complete or not there."""

from mpipar.checkpoint.store import load, newest, save

__all__ = ["load", "newest", "save"]
