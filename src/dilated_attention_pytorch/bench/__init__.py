"""Attention by name, compared on this machine: `python -m dilated_attention_pytorch.bench --help`."""
