"""The tests, and ``python -m tests``, which runs them all as CI does."""
