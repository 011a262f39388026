"""The transport over MPI: its start, its groups, its messages, and who watches over a job."""
