"""Trains a small language model of bytes on one text, then writes on from a prompt, byte by byte.

    python examples/generate_text.py
    python examples/generate_text.py --sample --temperature 0.8 --prompt "when the Rabbit"
    python examples/generate_text.py --save model && python examples/generate_text.py --load model

The text is short, so the model learns it by heart: from words of the text it goes on as the text does. While
it writes, it keeps one segment of each branch of its attention, so that neither the memory nor the time of a
byte grows with what is written.
"""

from __future__ import annotations

import argparse
import codecs
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention_pytorch import LongNetLM

# The beginning of "Alice's Adventures in Wonderland" by Lewis Carroll, 1865.
TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: \
once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations \
in it, "and what is the use of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy \
and stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and \
picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear \
the Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it \
occurred to her that she ought to have wondered at this, but at the time it all seemed quite natural); but \
when the Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, and then hurried on, \
Alice started to her feet, for it flashed across her mind that she had never before seen a rabbit with \
either a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran across the \
field after it, and fortunately was just in time to see it pop down a large rabbit-hole under the hedge.
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--prompt",
        default="There was nothing so very remarkable",
        help="to go on from (default: %(default)r)",
    )
    parser.add_argument("--tokens", type=int, default=300, help="bytes to write (default: %(default)s)")
    parser.add_argument("--sample", action="store_true", help="draw bytes at random instead of the likeliest")
    parser.add_argument("--temperature", type=float, default=1.0, help="of --sample (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=None, help="of --sample (default: all bytes)")
    parser.add_argument("--seed", type=int, default=0, help="of training and --sample (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of training (default: %(default)s)")
    parser.add_argument(
        "--length", type=int, default=256, help="bytes of a training row (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=4, help="rows of a step (default: %(default)s)")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations in backward")
    parser.add_argument("--save", metavar="FOLDER", help="write the trained model into this folder")
    parser.add_argument("--load", metavar="FOLDER", help="use the model of this folder instead of training")
    return parser.parse_args()


def make_model(options: argparse.Namespace) -> LongNetLM:
    return LongNetLM(
        vocab_size=256,
        d_model=128,
        nhead=4,
        num_layers=2,
        dim_feedforward=256,
        # The ends of the two short segments coincide only at 480: most tokens have neighbours in one of them.
        segment_lengths=(96, 160, 512),
        dilation_rates=(1, 1, 4),
        checkpoint_activations=options.checkpoint,
    )


def train(model: LongNetLM, text: Tensor, options: argparse.Namespace) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=options.steps)
    length = min(options.length, len(text) - 1)
    begin = time.perf_counter()
    for step in range(options.steps):
        starts = torch.randint(len(text) - length, (options.batch,))
        rows = text[starts[:, None] + torch.arange(length + 1)]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 50 == 0 or step + 1 == options.steps:
            print(f"step {step:4d}, {time.perf_counter() - begin:5.1f} s, loss {loss.item():.3f}", flush=True)


def write(model: LongNetLM, options: argparse.Namespace) -> None:
    prompt = torch.tensor([list(options.prompt.encode())])
    how = {"temperature": options.temperature, "top_p": options.top_p}
    if options.sample:
        how["seed"] = options.seed
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may take several bytes
    print(f"\n{options.prompt}", end="", flush=True)
    begin = time.perf_counter()
    for token in model.stream(prompt, options.tokens, do_sample=options.sample, **how):
        print(decoder.decode(bytes(token.tolist())), end="", flush=True)
    print(f"\n\n{options.tokens / (time.perf_counter() - begin):.0f} bytes a second")


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    if options.load:
        model = LongNetLM.from_pretrained(options.load)
    else:
        model = make_model(options)
        print(
            f"{sum(p.numel() for p in model.parameters()):,} parameters, a text of {len(TEXT.encode())} bytes"
        )
        train(model, torch.tensor(list(TEXT.encode())), options)
    if options.save:
        model.save_pretrained(options.save)
    write(model, options)


if __name__ == "__main__":
    main()
