"""The command line: `dilated-attention <command>`, also `python -m dilated_attention_pytorch <command>`."""
