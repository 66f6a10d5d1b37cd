"""Rewrite a model's experts into a side-file: ``coalesce_rewrite.py MODEL_DIR -o SIDEFILE``.

The same as ``mbolt-mlx coalesce --model MODEL_DIR -o SIDEFILE``.
"""

import sys

from mbolt_mlx.cli.coalesce_rewrite import main

if __name__ == "__main__":
    sys.exit(main())
