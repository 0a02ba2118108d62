"""``python -m rdmaview`` is the ``rdmaview`` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
