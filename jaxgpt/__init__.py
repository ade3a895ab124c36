"""Pre-train GPT models with JAX, on any mesh, from one command."""

__version__ = "0.1.0"
