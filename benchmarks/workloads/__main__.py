"""``python -m benchmarks.workloads``."""

import sys

from benchmarks.workloads import main

if __name__ == "__main__":
    sys.exit(main())
