"""`python -m lightning_par`, the same as `lightning-par`."""

import sys

from lightning_par.cli import main

sys.exit(main())
