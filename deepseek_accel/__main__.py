"""`python -m deepseek_accel` is the command `deepseek-accel`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
