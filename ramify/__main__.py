"""``python -m ramify``: the command line, also where the script `ramify` is not on the PATH."""

import sys

from ramify.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
