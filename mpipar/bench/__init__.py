"""Measurement of collectives: ours against the MPI underneath, in one run."""
