"""Gradients of each example of a batch, clipped and measured without being made.

1. `prepare` is the road of both public functions: from parameters and a batch to a run over the
   examples, all at once or a part at a time (`batches`).
2. `walk` follows each weight through the loss of one example to the operations where it meets data
   (`use_kinds`). There a tap (`taps`) hands out the rows of the gradient: what went in, and the
   cotangent of what came out.
3. `norms_of_rows` and `clipped_sums` make the norm of each example and the clipped sum of all from
   these rows, after one backward pass (`gradients`).
4. A leaf that is used in any other way has its gradient made for each example; `gradient_methods`
   decides, and `plan` shows why.
"""

from clipgrad._per_example.clip_per_example import clip_per_example as clip_per_example
from clipgrad._per_example.per_example_norms import per_example_norms as per_example_norms
