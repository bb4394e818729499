"""The architecture, as plain PyTorch modules on the meta device and pure functions around them."""

from forge.model.init import init_params
from forge.model.transformer import Transformer, build_model

__all__ = ["Transformer", "build_model", "init_params"]
