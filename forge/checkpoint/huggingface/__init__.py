"""The layout of Hugging Face models: `config.json`, safetensors and a tokenizer, out of forge and into it."""

from forge.checkpoint.huggingface.read import import_folder
from forge.checkpoint.huggingface.write import export_checkpoint, parse_size

__all__ = ["export_checkpoint", "import_folder", "parse_size"]
