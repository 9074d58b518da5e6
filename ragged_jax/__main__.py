"""`python -m ragged_jax` is the command `ragged-jax`."""

import sys

from .cli import main

sys.exit(main())
