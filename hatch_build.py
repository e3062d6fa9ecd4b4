"""Compiles the native kernel into the package where there is a C compiler; else it goes without."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

NATIVE = Path("src/dilated_attention_pytorch/kernels/native")


class NativeKernel(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        spec = spec_from_file_location("native_build", Path(self.root) / NATIVE / "build.py")
        assert spec is not None
        assert spec.loader is not None
        builder = module_from_spec(spec)
        spec.loader.exec_module(builder)
        try:
            builder.build()
        except builder.BuildError as error:
            self.app.display_warning(f"the native kernel is left out: {error}")
            return
        build_data["artifacts"].append(f"{NATIVE}/native.so")
        build_data["pure_python"] = False
        # Neither Python's nor torch's binary interface is used: any interpreter of this platform will do.
        build_data["tag"] = f"py3-none-{next(sys_tags()).platform}"
