"""mbolt for GGUF files: rewrite by a routing profile, prefetch, and the patched llama.cpp.

Imports ``mbolt_mlx.core`` and ``mbolt_mlx.profile`` only, and no MLX.
"""

import mbolt_mlx

__version__ = mbolt_mlx.__version__
