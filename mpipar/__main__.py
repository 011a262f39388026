"""``python -m mpipar``: the command line where pip's scripts are not on ``PATH``."""

import sys

from mpipar.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
