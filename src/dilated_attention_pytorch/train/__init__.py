"""WHAT LEARNS: a trainer of `LongNetLM` on the bytes of text files, and what it made writing on."""
