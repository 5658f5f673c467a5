"""``python -m heedful`` is ``heedful``; so ``torchrun -m heedful`` starts it in several processes."""

import sys

from heedful.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
