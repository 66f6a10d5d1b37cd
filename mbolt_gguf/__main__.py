"""``python -m mbolt_gguf`` is ``mbolt-gguf``."""

import sys

from mbolt_gguf.cli.main import main

sys.exit(main())
