"""The commands of ``mbolt-gguf``: one module each, thin; they parse, call the library and print."""
