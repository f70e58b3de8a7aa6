"""Six torch models beside their JAX ports, and forty mistakes of such ports.

Written by somebody who had read the pages of clipgrad and not its code, before any of it was run.
"""

from benchmarks.ports import cache, conv, gru, llama, mlp, vit

TWINS = [twin for module in (mlp, gru, conv, llama, vit, cache) for twin in module.TWINS]
