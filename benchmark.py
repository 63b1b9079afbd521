"""Time EAGLE decoding, a decode step, or its single operations: python benchmark.py --help

`eagle-triton bench` is the same; eagle_triton/benchmarks/main.py has what both run.
"""

import signal
import sys

from eagle_triton.benchmarks.main import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends a run as Ctrl-C does
    sys.exit(main())
