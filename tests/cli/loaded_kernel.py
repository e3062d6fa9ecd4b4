"""A process of its own that loads a written repository by `kernels`, before and after the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from kernels import get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, Metadata
from torch._subclasses.fake_tensor import FakeTensorMode

hub = Path(sys.argv[1])
torch.set_num_threads(1)


def gradients(function: Any, *args: Any, **options: Any) -> list[torch.Tensor]:
    """The result of a function of q, k and v, and their gradients."""
    tensors = [x.detach().requires_grad_() for x in args[:3]]
    out = function(*tensors, *args[3:], **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)]


# The repository is found by its variant for this machine, and its hashes are those that `kernels` computes.
before = get_local_kernel(hub)
assert "dilated_attention_pytorch" not in sys.modules
assert Path(before.__file__).parent == hub / "build" / "torch-cpu"
for variant in (hub / "build").iterdir():
    digest = Metadata.read_from_file(variant / "metadata.json").digest
    assert digest is not None
    digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))

import dilated_attention_pytorch as package  # noqa: E402
from dilated_attention_pytorch.reference import (  # noqa: E402
    block_sparse_attention_reference,
    dilated_attention_reference,
)

after = get_local_kernel(hub / "build" / "torch-cuda")  # the same sources, under another name
names = {each.__name__ for each in (before, after, package)}
assert len(names) == 3
assert all(hasattr(getattr(torch.ops, name), "attention_backward") for name in names)

BRANCHES, CAUSAL = ([16, 50], [1, 3]), {"is_causal": True}
WINDOW = {"pattern_type": "local_window", "block_size": 8, "window_size": 24}


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, b.abs().max().item()))


for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
    q, k, v = torch.randn(3, 1, 97, 4, 8, dtype=dtype)
    dilated = gradients(dilated_attention_reference, q, k, v, *BRANCHES, **CAUSAL)
    for each in (before, after, package):
        pattern = each.build_block_pattern(each.SparsePatternConfig(**WINDOW), 97, 4)
        sparse = gradients(block_sparse_attention_reference, q, k, v, pattern.to_dense(), **CAUSAL)
        assert_near(gradients(each.dilated_attention, q, k, v, *BRANCHES, **CAUSAL), dilated, tolerance)
        assert_near(gradients(each.block_sparse_attention, q, k, v, pattern, **CAUSAL), sparse, tolerance)

with FakeTensorMode():
    assert before.dilated_attention(*torch.randn(3, 1, 97, 4, 8), *BRANCHES).shape == (1, 97, 4, 8)
native = sys.modules[f"{before.__name__}.dilated_attention_pytorch.kernels.native"]
assert native.load_library() == "this copy of the package comes without it; the installed package has it"

# Models of transformers: two copies under two names, the same results, with padding and packed documents too.
import transformers  # noqa: E402

from dilated_attention_pytorch.integrations.transformers import use_dilated_attention  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, pad_token_id=0, **SIZES)).eval()
ids, mask = torch.randint(1, 32, (2, 40)), torch.ones(2, 40, dtype=torch.long)
mask[0, :7] = 0
packed = torch.cat([torch.arange(13), torch.arange(27)])[None]
calls = [{}, {"attention_mask": mask}, {"position_ids": packed.expand(2, -1)}]


def logits() -> list[torch.Tensor]:
    """Of each call, at its tokens."""
    with torch.no_grad():
        return [model(ids, use_cache=False, **call).logits[mask > 0] for call in calls]


dense = logits()
settings = {"segment_lengths": [8, 40], "dilation_rates": [1, 2]}
use_dilated_attention(model, settings)
expected = logits()
assert all((a - b).abs().max() > 1e-3 for a, b in zip(dense, expected, strict=True))
before.transformers.use_dilated_attention(model, settings, name="of_the_hub")
assert model.config._attn_implementation == "of_the_hub"
torch.testing.assert_close(logits(), expected)
