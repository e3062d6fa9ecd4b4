"""The python snippets of the requirement documents, by document and name, as snippets.md has them."""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = re.compile(r"^## (\S+ \S+)\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SNIPPETS: dict[str, str] = dict(_BLOCK.findall(Path(__file__).with_suffix(".md").read_text()))
