"""Two torch models beside their JAX ports, and mistakes of such ports, for the next score.

Written by somebody who had read the pages of clipgrad and not its code, before any of it was run.
"""

from benchmarks.ports import llama, vit

TWINS = [*llama.TWINS, *vit.TWINS]
