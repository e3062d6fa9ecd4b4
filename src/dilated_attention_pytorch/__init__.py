"""Attention over sequences too long for dense attention: exact dilated attention for PyTorch."""

import warnings

with warnings.catch_warnings():
    # torch warns when it is imported without NumPy, which nothing here needs.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    from .attention_maps import attention_rows
    from .functional import dilated_attention
    from .modules import DilatedAttention
    from .spec import DilatedSpec

__all__ = ["DilatedAttention", "DilatedSpec", "attention_rows", "dilated_attention"]
__version__ = "0.1.0"
