"""Gradients of each example of a batch, clipped and measured without being made."""

from clipgrad._per_example.clip import clip_per_example as clip_per_example
from clipgrad._per_example.norms import per_example_norms as per_example_norms
