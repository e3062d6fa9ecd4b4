"""Measurements of this library: `python -m dilated_attention_pytorch.bench --help`."""
