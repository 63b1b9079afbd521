"""`python -m eagle_triton` is the program `eagle-triton`."""

import sys

from eagle_triton.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
