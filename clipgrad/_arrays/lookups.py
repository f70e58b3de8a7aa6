"""Fields of results that are looked up as elsewhere: what there is, and what to write."""

import difflib
import functools
from collections.abc import Callable, Collection
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)

# A field here, and what it was called before, or is called elsewhere.
_WORDS = {
    "all_zero": "zeros is_zero",
    "batch": "data inputs",
    "captures": "path paths",
    "clips": "clip_stats stats",
    "clipped": "was_clipped is_clipped",
    "directory": "folder dir",
    "grad": "grad_norm gradient",
    "limit": "threshold",
    "max": "amax absmax abs_max largest maximum",
    "max_relative_error": "error max_error rel_error relative_error",
    "message": "reason report summary text",
    "norm": "grad_norm gradient_norm l2_norm",
    "ok": "success passed is_ok valid",
    "param": "param_norm parameter weight weight_norm",
    "params": "model parameters variables weights",
    "raw_norm": "norm grad_norm gradient_norm",
    "record": "save log add",
    "skipped_consecutive": "consecutive",
    "state": "opt_state train_state",
    "update": "update_norm",
    "zero_fraction": "zeros sparsity",
}
FIELDS_ELSEWHERE = {field: words.split() for field, words in _WORDS.items()}


def answers_lookups(noun: str, **instead: str) -> Callable[[Class], Class]:
    """A decorator of a class: a field that it lacks, or one in brackets, says what to write.

    Args:
      noun: an object of the class, as users would call it.
      **instead: what to write in place of a name that is no field.
    """

    def decorate(cls: Class) -> Class:
        others = vars(cls).get("__getattr__", object.__getattribute__)

        @functools.lru_cache(maxsize=256)  # whoever asks whether there is a field, asks often
        def answer(name: str) -> str:
            if name in instead:
                return f"write {instead[name]}"
            near = nearest_word(name, there := _fields(cls))
            return f"write {noun}.{near}" if near else f"there are {', '.join(there)}"

        def missing(self: Any, name: str) -> Any:
            if hasattr(cls, name):  # a property, which raised an error of its own
                return object.__getattribute__(self, name)
            try:
                return others(self, name)
            except AttributeError:
                more = "" if name.startswith("_") else f"; {answer(name)}"
                text = f"{cls.__name__!r} object has no attribute {name!r}{more}"
                raise AttributeError(text, name=name, obj=self) from None

        def item(self: Any, key: Any) -> Any:
            if isinstance(key, str):
                raise TypeError(f"{noun}: got [{key!r}], expected an attribute; {answer(key)}")
            if isinstance(self, tuple):
                return tuple.__getitem__(self, key)
            raise TypeError(f"{cls.__name__!r} object is not subscriptable")

        # Not written in the class, since type checkers would then take any name for a field.
        for name, method in (("__getattr__", missing), ("__getitem__", item)):
            setattr(cls, name, method)
        return cls

    return decorate


class Findings(tuple[Any, ...]):
    """What a report has found; the first of none is answered by what to read instead."""

    def __getitem__(self, key: Any) -> Any:
        if not self and isinstance(key, int):
            raise IndexError(
                "got the first of no findings, since nothing was found to be wrong; write .message "
                "for the first one or what is right, or ask .ok"
            )
        return super().__getitem__(key)


def nearest_word(name: str, there: Collection[str]) -> str:
    """The field that a name stands for, or is spelled like; "" if there is none."""
    if name in there:
        return name
    meant = [field for field in there if name in FIELDS_ELSEWHERE.get(field, ())]
    return next(iter(meant or difflib.get_close_matches(name, there, 1)), "")


def _fields(cls: type) -> list[str]:
    """The public fields of a class, and then its methods and properties."""
    inherited = dir(tuple) if issubclass(cls, tuple) else ()
    fields = [*getattr(cls, "__annotations__", ()), *(n for n in dir(cls) if n not in inherited)]
    return [name for name in dict.fromkeys(fields) if not name.startswith("_")]
