"""Signatures as people would write them: types by their names, defaults as numbers."""

from collections.abc import Callable
from typing import Any

import jax
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

from clipgrad._clip.thresholds import Number
from clipgrad.types import Patterns, Threshold, Where

_CALLABLE = "~collections.abc.Callable"
_DECORATED = "~clipgrad._error_clip.error_clip.Decorated"
_ARRAY_LIKE = "~jax.typing.ArrayLike"
# In this order, since later ones hold earlier ones.
_SHORT = {
    **{
        stringify_annotation(alias, "smart"): f"~clipgrad.types.{name}"
        for name, alias in (("Threshold", Threshold), ("Where", Where), ("Patterns", Patterns))
    },
    stringify_annotation(Number, "smart"): "~jax.typing.ArrayLike | ~optax.Schedule",
    stringify_annotation(jax.typing.ArrayLike, "smart"): _ARRAY_LIKE,
    stringify_annotation(jax.Array, "smart"): "~jax.Array",
    f"{_CALLABLE}[[{_ARRAY_LIKE}], {_ARRAY_LIKE}]": "~optax.Schedule",
    stringify_annotation(Callable[..., Any], "smart"): _CALLABLE,
    stringify_annotation(Callable[[Any], Any], "smart"): _CALLABLE,
    "~clipgrad._error_clip.by_name.ClippedByName": _CALLABLE,
    "~clipgrad._error_clip.everywhere.Transformed": _CALLABLE,
    f"{_CALLABLE}[[{_DECORATED}], {_DECORATED}]": _CALLABLE,
    "_TWO": "2",
    "_WINDOW": "128",
}


def shorten(app: Sphinx, what: str, name: str, *given: Any) -> tuple[Any, Any] | None:
    """Puts the short forms into a signature."""
    *_, signature, result = given
    return (_shortened(signature), _shortened(result)) if signature else None


def _shortened(text: str | None) -> str | None:
    for long, short in _SHORT.items():
        text = text and text.replace(long, short)
    return text


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers this with Sphinx."""
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
