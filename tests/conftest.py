"""The plugin that users get with the library, also where the library is not installed."""

from importlib.metadata import entry_points

PLUGIN = "mpipar.testing.plugin"

if not any(entry.value == PLUGIN for entry in entry_points(group="pytest11")):
    pytest_plugins = [PLUGIN]
