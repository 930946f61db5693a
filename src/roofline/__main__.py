"""`python -m roofline`: the command line, where the script `roofline` is not on the path."""

import sys

from roofline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
