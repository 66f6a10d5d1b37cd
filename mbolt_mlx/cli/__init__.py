"""The commands of ``mbolt-mlx``: one module each, thin; they parse, call the library and print."""
