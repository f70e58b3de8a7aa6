"""Calls of public functions that do not fit: what was meant, in the words of other libraries."""

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from clipgrad._arrays.trees import described
from clipgrad._arrays.user_functions import fits, parameter_names, whole_tuple_of

Explained = TypeVar("Explained", bound=Callable[..., Any])

# A keyword here, and those of optax, torch, jax.test_util, Paddle, a trainer, or another function
# here that stand for it. Those that are spelled much alike, as ``no_grad_set``, need no row.
_WORDS = {
    "accumulate": "accumulation_steps every_k_schedule gradient_accumulation "
    "gradient_accumulation_steps grad_accum micro_batches microbatches num_microbatches",
    "argnums": "argnum wrt",
    "axis": "axes dim dims",
    "axis_name": "pmap_axis_name",
    "by": "group group_by groupby level",
    "clipping": "clip_factor clipping_factor clipping_threshold lam lambda_ threshold",
    "decay": "alpha beta ema_decay momentum",
    "delta": "check_eps eps numeric_grad_delta step",
    "directory": "dir folder logdir path save_dir",
    "error_clip": "error_clip_by_name rules",
    "fun": "f fn func function loss loss_fn",
    "grads": "grad gradients updates",
    "inner": "opt optim optimizer tx",
    "inputs": "input rule rules",
    "judge": "criterion metric monitor on",
    "like": "item params target template",
    "loss_fn": "f fn fun func loss loss_function",
    "max": "a_max clip clip_value clip_value_max clipping_threshold high limit max_delta max_norm "
    "max_value threshold upper",
    "max_norm": "clip clip_grad_norm clip_norm clipping_threshold grad_clip grad_clip_norm "
    "gradient_clip_norm gradient_clip_val l2_clip l2_clip_norm l2_norm_clip limit max "
    "max_grad_norm threshold",
    "microbatch": "batch_size chunk_size microbatch_size",
    "min": "a_min clip_value_min low lower min_value",
    "mode": "fast_mode",
    "names": "map mapping name_map rename",
    "optimizer": "inner opt optim tx",
    "ord": "norm_type order p",
    "other_args": "args2 args_other",
    "path": "file file_name filename",
    "percentile": "p q quantile",
    "raise_on_failure": "raise_exception",
    "raise_on_halt": "raise_error raise_exception",
    "reduce": "reduction",
    "rtol": "atol tol tolerance",
    "rules": "clip clips error_clip error_clip_by_name rule",
    "sigma": "num_std std z z_threshold zscore",
    "skip": "check_batched_grad",
    "stacked": "layer_axis layers scan scanned",
    "threshold": "clipping clipping_threshold max max_norm",
    "tolerance": "atol rtol tol",
    "tree": "grads gradients updates",
    "watch": "names watch_values",
    "watch_values": "names watch",
    "where": "filter mask need_clip",
    "window": "history history_len history_length length maxlen window_size",
    "wrt": "argnum argnums input_to_check inputs_to_check",
    "z": "sigma threshold z_thresh z_threshold",
}
ELSEWHERE = {name: words.split() for name, words in _WORDS.items()}
# Keywords whose value is another one here, with the keyword that they stand for.
_VALUES = {
    "error_if_nonfinite": ("nonfinite", lambda value: '"error"' if value else '"propagate"'),
    **dict.fromkeys(("exclude", "ignore", "skip_names"), ("where", lambda value: _left_out(value))),
}
# What functions return that has a state, and so an ``init``, which is asked for in chains, too.
_HAVE_INIT = ("GradientTransformationExtraArgs", "TrainStep")
# A rule that has a field, and the clip of it, for calls with the field instead of a rule.
_RULES = {
    "max_norm": ("ClipByGlobalNorm", "clip_by_global_norm"),
    "max": ("ClipByValue", "clip_by_value"),
    "clipping": ("AdaptiveClip", "adaptive_grad_clip"),
}


_REQUIRED = inspect.Parameter.empty


def _left_out(names: Any) -> str:
    """The patterns that leave out what these names select."""
    if isinstance(names, str):
        return repr(f"!{names}")
    are_names = isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)
    return repr(tuple(f"!{name}" for name in names)) if are_names else "..."


def explain_call(
    instead: str = "", name: str = "", /, **keywords: str
) -> Callable[[Explained], Explained]:
    """A decorator: a call that does not fit the signature is an error that says what to write.

    It decorates functions, methods and classes, of which it explains the call that makes one.

    Args:
      instead: what to write instead of more positional arguments than there are parameters. A
        function of ``(fun, args)`` needs none.
      name: what users call it, if that is another name than the one that it is defined by.
      **keywords: what to write instead of a keyword that no other keyword stands for.
    """

    def decorate(target: Any) -> Any:
        function = target.__init__ if isinstance(target, type) else target
        called = Signature(function, name or target.__name__)

        @functools.wraps(function)
        def explained(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            try:
                return function(*args, **kwargs)
            except TypeError:
                if wrong := called.misfit(args, kwargs, instead, keywords):
                    raise TypeError(f"{called.name}: {wrong}") from None
                raise

        if function is target:
            if getattr(called.signature.return_annotation, "__name__", "") in _HAVE_INIT:
                setattr(explained, "init", _refused_init(called.name))  # noqa: B010
            return explained
        target.__init__ = explained
        return target

    return decorate


def _refused_init(name: str) -> Callable[..., Any]:
    """What stands for ``init`` of a function that returns something that has it."""

    def init(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise TypeError(
            f"{name}: got the function, expected what it returns; call it first, as in {name}(...)"
        )

    return init


class Signature:
    """The signature of a public function, and what is wrong with a call of it."""

    def __init__(self, function: Callable[..., Any], name: str):
        self.name, self.signature = name, inspect.signature(function)
        path = function.__qualname__.rpartition("<locals>.")[2]
        self.owner = path.rpartition(".")[0]  # the class of a method
        self.known = dict(list(self.signature.parameters.items())[bool(self.owner) :])
        self.positional = [n for n, p in self.known.items() if p.kind is not p.KEYWORD_ONLY]

    def misfit(self, args: Any, kwargs: Any, instead: str, keywords: dict[str, str]) -> str:
        """The error of a call that does not fit; empty for one that does."""
        if fits(self.signature, args, kwargs):
            return ""
        if self.owner and not self._is_of_owner(args):
            return (
                "got a call on the class, expected one on an object of it; write the class with "
                f"its arguments, such as {self.owner}(...)"
            )
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in self.known.values()):
            return ""
        args = args[bool(self.owner) :]
        if wrong := next((name for name in kwargs if name not in self.known), None):
            return self._wrong_keyword(wrong, args, kwargs, keywords)
        if len(args) > len(self.positional):
            return self._too_many(args, instead)
        if twice := next((name for name in self.positional[: len(args)] if name in kwargs), None):
            return f"got {twice} by position and by name, expected it once"
        return self._missing(args, kwargs)

    def _is_of_owner(self, args: Any) -> bool:
        """Whether the first argument is an object of the class that has this method."""
        return bool(args) and self.owner in {cls.__name__ for cls in type(args[0]).__mro__}

    def _wrong_keyword(self, wrong: str, args: Any, kwargs: Any, keywords: dict[str, str]) -> str:
        value = _as_written(kwargs[wrong])
        got = f"got {wrong}={value}"
        meant = next((name for name in self.known if wrong in ELSEWHERE.get(name, ())), None)
        if meant:
            return f"{got}, expected {meant}={value}"
        if wrong in keywords:
            return f"{got}; {keywords[wrong]}"
        if wrong in _VALUES and _VALUES[wrong][0] in self.known:
            name, of = _VALUES[wrong]
            return f"{got}, expected {name}={of(kwargs[wrong])}"
        if args and self._is_of_function(wrong, args, kwargs):
            return (
                f"{got}, an argument of {self.positional[0]}, expected it in the tuple of "
                f"arguments; write {self._with_arguments(args[0], [])}"
            )
        if "rules" in self.known and callable(kwargs[wrong]):
            return f'{got}, expected rules={{"{wrong}": ...}}'
        if call := self._with_rule(wrong, value):
            return f"{got}, expected a rule with it; write {call}"
        near = self._spelled_like(wrong)
        expected = f"{near}={value}" if near else f"some of {', '.join(self.known)}"
        return f"{got}, expected {expected}"

    def _spelled_like(self, wrong: str) -> str:
        """The parameter that a keyword, or a word for it elsewhere, is spelled like; or empty."""
        words = {word: name for name in self.known for word in ELSEWHERE.get(name, ())}
        near = difflib.get_close_matches(wrong, self.known, 1)
        like = difflib.get_close_matches(wrong, words, 1, cutoff=0.85)
        return next(iter([*near, *map(words.__getitem__, like)]), "")

    def _with_rule(self, word: str, value: str) -> str:
        """The call with a rule that has this field, for a function of a rule; or empty."""
        fields = (word, *(field for field in _RULES if word in ELSEWHERE[field]))
        field = next((field for field in fields if field in _RULES), None)
        places = ("rule", "rules", "inputs", "optimizer")
        place = next((name for name in places if name in self.known), None)
        if field is None or place is None:
            return ""
        is_of_cotangents = "error" in self.name or "cotangent" in self.name
        rule, clip = _RULES[field]
        rule = f"{'Error' * (is_of_cotangents and field == 'max')}{rule}({field}={value})"
        written = {
            "rules": f'{{"name": {rule}}}',
            "optimizer": f"optax.chain({clip}({field}={value}), optimizer)",
        }.get(place, rule)
        before = self.positional[: self.positional.index(place)]
        return f"{self.name}({', '.join([*before, written])})"

    def _too_many(self, args: Any, instead: str) -> str:
        got = f"got {len(args)} positional arguments, expected"
        first = self.positional.index("args") if self._takes_arguments() else 0
        if first and not instead and not isinstance(args[first], tuple):
            behind = len(self._required_behind())  # such as a path, which stays where it is
            call = self._with_arguments(args[0], args[first : len(args) - behind])
            return f"{got} those of {self.positional[0]} in one tuple; write {call}"
        by_name = [f"{name}=" for name in self.known if name not in self.positional]
        hint = instead or (f"write the others by name, of {', '.join(by_name)}" if by_name else "")
        most = f"at most {len(self.positional)}, ({', '.join(self.positional)})"
        return f"{got} {most}{'; ' * bool(hint)}{hint}"

    def _missing(self, args: Any, kwargs: Any) -> str:
        """The parameters without a default that got nothing, and the whole call."""
        needed = [name for name, p in self.known.items() if p.default is _REQUIRED]
        missing = [n for n in needed if n not in kwargs and n not in self.positional[: len(args)]]
        if self._takes_arguments() and args and "args" in missing:
            call = self._with_arguments(args[0], [])
            if callable(args[0]):
                return f"missing the argument 'args', the tuple of the arguments; write {call}"
            return (
                f"got {described(args[0])} alone, expected a function, without calling it, and the "
                f"tuple of its arguments; write {call}"
            )
        by_name = [n if n in self.positional else f"{n}={n}" for n in needed]
        call = f"{self.name}({', '.join(by_name)})"
        return f"missing the argument {' and '.join(map(repr, missing))}; write {call}"

    def _takes_arguments(self) -> bool:
        """Whether this is a function of a function and the tuple of its arguments."""
        return "args" in self.positional[1:]

    def _is_of_function(self, wrong: str, args: Any, kwargs: Any) -> bool:
        """Whether a keyword is an argument of the function that comes first."""
        if not self._takes_arguments():
            return False
        is_there = "args" in kwargs or len(args) > self.positional.index("args")
        return wrong in parameter_names(args[0]) or not is_there

    def _with_arguments(self, fun: Any, values: Sequence[Any]) -> str:
        """The call with the arguments in a tuple."""
        first = self.positional.index("args")
        before = ["loss" if not callable(fun) else self.positional[0], *self.positional[1:first]]
        written = [*before, whole_tuple_of(fun, values), *self._required_behind()]
        return f"{self.name}({', '.join(written)})"

    def _required_behind(self) -> list[str]:
        """The parameters without a default that come behind the tuple of arguments."""
        behind = self.positional[self.positional.index("args") + 1 :]
        return [name for name in behind if self.known[name].default is _REQUIRED]


def _as_written(value: Any) -> str:
    """A number or a text as it is written; arrays and trees are never printed."""
    return repr(value) if isinstance(value, bool | int | float | str | None) else "..."
