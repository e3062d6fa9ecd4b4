"""`python -m dilated_attention_pytorch <command>`; the same as `dilated-attention <command>`."""

from .cli.main import run_program

if __name__ == "__main__":
    run_program()
