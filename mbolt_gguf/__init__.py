"""mbolt for GGUF files and llama.cpp. Not written yet; see llama_patch/README.md."""
