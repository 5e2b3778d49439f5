"""`python -m specter_lab.cli`: the same as `specter-lab`."""

import sys

from specter_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
