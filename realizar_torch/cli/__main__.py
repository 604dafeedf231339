"""``python -m realizar_torch.cli``: the command line without its installed script."""

import sys

from realizar_torch.cli import main

if __name__ == "__main__":
    sys.exit(main())
