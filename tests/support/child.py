"""What processes of their own do in tests of the bench."""

from __future__ import annotations

import os
import time

import torch

from dilated_attention_pytorch.cli.bench.measure import Measured, NotMeasurableError


def child(what: str) -> Measured:
    """What a process of its own does here."""
    match what:
        case "threads":
            return Measured(0.0, {"threads": torch.get_num_threads(), "pid": os.getpid()})
        case "platform":
            raise NotMeasurableError("no /proc here")
        case "memory":
            raise MemoryError("no more")
        case "signal":
            os.kill(os.getpid(), 9)
        case "sleep" | "announce":
            print(what, flush=True)
            time.sleep(60)
    raise LookupError(what)
