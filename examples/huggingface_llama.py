"""A Llama of Hugging Face transformers with dilated attention: it learns a text, then continues it.

    python examples/huggingface_llama.py

The model is small and starts from random weights, so nothing is downloaded. Its tokens are bytes. The
prompts that it continues have different lengths and are padded on the left, as batches for generation are.
"""

from __future__ import annotations

import argparse

import torch
import transformers
from torch import Tensor

from dilated_attention_pytorch.integrations.transformers import register

TEXT = (
    "A query reads the keys of its own segment, and of a longer segment only every second or fourth. "
    "Near words are read densely, far words sparsely, and the cost of a token does not grow with the text. "
    "What one head leaves out another head reads, because each head starts at a place of its own. "
)
PROMPTS = ("A query reads the keys", "Near words are", "What one head leaves out another")
PAD = 0  # a byte that the text does not hold


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=200, help="of training (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=60, help="(default: %(default)s)")
    return parser.parse_args()


def make_model() -> transformers.LlamaForCausalLM:
    register()
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="dilated",
        dilated_attention={"segment_lengths": [24, 80, 512], "dilation_rates": [1, 2, 4]},
    )
    return transformers.LlamaForCausalLM(config)


def train(model: transformers.LlamaForCausalLM, options: argparse.Namespace, device: torch.device) -> None:
    repeated = torch.tensor(list((TEXT * (2 + options.length // len(TEXT))).encode()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, options.steps)
    model.train()
    for step in range(options.steps):
        starts = torch.randint(len(TEXT), (options.batch,))
        ids = torch.stack([repeated[start : start + options.length] for start in starts.tolist()]).to(device)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 40 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")


def left_padded(prompts: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Tokens and mask (b, n)."""
    rows = [torch.tensor(list(prompt.encode())) for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side="left")
    return ids, (ids != PAD).long()


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model().to(device)
    print(f"{sum(x.numel() for x in model.parameters())} parameters, {model.config.dilated_attention}")
    train(model, options, device)
    ids, mask = (x.to(device) for x in left_padded(PROMPTS))
    out = model.eval().generate(ids, attention_mask=mask, max_new_tokens=options.new_tokens, do_sample=False)
    for row in out.tolist():
        print(repr(bytes(token for token in row if token != PAD).decode(errors="replace")))


if __name__ == "__main__":
    main()
