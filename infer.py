"""Chat with a model by every drafting method: `python infer.py` is `eagle-triton chat`."""

import sys

from eagle_triton.cli.chat import main

if __name__ == "__main__":
    sys.exit(main(program="infer.py"))
