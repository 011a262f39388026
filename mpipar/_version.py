"""The version, in one place."""

version = "0.1.0"
