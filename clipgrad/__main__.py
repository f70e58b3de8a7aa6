"""``python -m clipgrad``."""

import sys

from clipgrad._commands import main

if __name__ == "__main__":
    sys.exit(main())
