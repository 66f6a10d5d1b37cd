"""mbolt for GGUF files: rewrite by a routing profile, prefetch, and the patched llama.cpp.

Imports ``mbolt_mlx.core`` and ``mbolt_mlx.profile`` only, and no MLX.
"""

from mbolt_mlx import __version__

__all__ = ["__version__"]
