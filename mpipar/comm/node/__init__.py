"""Calls through the shared memory of a node: arena, flags, algorithms, calls made again."""
