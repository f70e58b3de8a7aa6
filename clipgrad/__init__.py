"""Clip cotangents and gradients in JAX, and prove gradients right."""

import importlib.metadata

__version__ = importlib.metadata.version("clipgrad")
