"""`python -m dilated_attention_pytorch.bench`: the same as `dilated-attention bench`."""

import sys

from ..cli.main import run_program

if __name__ == "__main__":
    run_program(["bench", *sys.argv[1:]])
