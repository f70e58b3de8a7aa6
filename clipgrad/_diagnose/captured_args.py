"""The arguments of a step that a recorder has kept, as a diagnosis gets them."""

from typing import Any

import jax

NO_MODELS = (
    "a capture has dictionaries instead of models and other objects, because loading does not run "
    "code from it; write diagnose(loss, (capture.restore(model), capture.batch))"
)


class CapturedArgs(tuple):
    """The parameters and the batch of a bad step.

    Attributes:
      expected: what a diagnosis says if it finds nothing; "" if the step was finite, a spike.
    """

    expected: str = ""


def _flatten(args: CapturedArgs) -> tuple[list[tuple[Any, Any]], str]:
    keys = map(jax.tree_util.SequenceKey, range(len(args)))
    return list(zip(keys, args, strict=True)), args.expected


def _unflatten(expected: str, children: Any) -> CapturedArgs:
    args = CapturedArgs(children)
    args.expected = expected
    return args


jax.tree_util.register_pytree_with_keys(CapturedArgs, _flatten, _unflatten)
