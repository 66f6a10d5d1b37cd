"""``python -m mbolt_mlx`` is ``mbolt-mlx``."""

import sys

from mbolt_mlx.cli.main import main

sys.exit(main())
