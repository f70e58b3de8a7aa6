"""Gradients of each example of a batch, clipped and measured without being made.

Each weight is followed through the program of the loss of one example to where it meets data.
There a tap hands out the rows of its gradient: what went in, and the cotangent of what came out.
The norm of each example and the clipped sum of all follow from these rows, after one backward pass.
A leaf that is used in any other way has its gradient made for each example.
"""

from clipgrad._per_example.clip_per_example import clip_per_example as clip_per_example
from clipgrad._per_example.per_example_norms import per_example_norms as per_example_norms
