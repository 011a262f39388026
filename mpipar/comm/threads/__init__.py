"""Ranks as threads of one process, one at a time."""
