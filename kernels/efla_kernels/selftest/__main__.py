"""`python -m efla_kernels.selftest`."""

import sys

from efla_kernels.selftest.run import main

if __name__ == "__main__":
    sys.exit(main())
