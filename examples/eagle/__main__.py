"""Generate text with the example model: ``python -m examples.eagle "The import statement"``."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
