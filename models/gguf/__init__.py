"""Models in GGUF, the files of llama.cpp: their weights as they are packed, and the settings and the
tokenizer that the metadata describes."""
