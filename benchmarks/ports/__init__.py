"""Six torch models beside their JAX ports, and 64 mistakes of such ports.

Written by somebody who had read the pages of clipgrad and not its code, before any of it was run;
the last 24 mistakes by somebody who had read neither.
"""

from benchmarks.ports import cache, conv, gru, llama, mlp, vit

TWINS = [twin for module in (mlp, gru, conv, llama, vit, cache) for twin in module.TWINS]
