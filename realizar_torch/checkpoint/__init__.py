"""Model files: GGUF containers and what their metadata says about tokenizers; knows formats, not models."""
