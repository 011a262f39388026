"""The plugin that users get with the library, also where the library is not installed."""

from importlib.metadata import entry_points

from hypothesis import settings

PLUGIN = "mpipar.testing.plugin"

if not any(entry.value == PLUGIN for entry in entry_points(group="pytest11")):
    pytest_plugins = [PLUGIN]

# Times do not decide whether a test passes: a busy machine may stop for a second.
settings.register_profile("mpipar", deadline=None)
settings.load_profile("mpipar")
