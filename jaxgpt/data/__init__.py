"""Table of token data formats. The first format that recognizes a path opens it."""

from jaxgpt.data import megatron, nanogpt
from jaxgpt.data.source import Format

FORMATS: dict[str, Format] = {
    "nanoGPT folder": Format(nanogpt.is_folder, nanogpt.open_folder),
    "Megatron": Format(megatron.is_pair, megatron.open_pair),
    "nanoGPT file": Format(nanogpt.is_file, nanogpt.open_file),
}
