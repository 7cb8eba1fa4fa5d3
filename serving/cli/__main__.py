"""`python -m jaxshare.serving.cli` is the `jaxshare` command."""

import sys

from jaxshare.serving.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
