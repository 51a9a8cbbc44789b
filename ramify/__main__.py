"""``python -m ramify``: the command line without its script."""

import sys

from ramify.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
