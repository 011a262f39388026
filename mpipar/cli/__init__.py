"""The command line: ``mpipar VERB``; the only room that prints."""
