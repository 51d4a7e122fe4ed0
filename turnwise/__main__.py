"""`python -m turnwise VERB`, the same as `turnwise VERB`."""

import sys

from turnwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
