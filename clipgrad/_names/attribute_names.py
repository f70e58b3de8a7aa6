"""Names of the submodules of NNX and Equinox models: their attribute paths, as named scopes.

Inside of the function that is transformed, each submodule of a model among its arguments has a
class of its own, a subclass of its class whose methods enter `jax.named_scope` with the path. In
Equinox the class is part of the tree's structure, so it goes through scans, `jax.vmap` and
`jax.checkpoint`; NNX takes it along in the same way. Outside of the function nothing changes.
"""

import functools
import inspect
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax

from clipgrad._arrays import path_string
from clipgrad._names.scopes import scope_around

AttributePath = tuple[str, ...]
Classes = dict[type, type]

# The path of the module that is being called: the path of one inside it goes on from there. JAX
# knows the scopes around an operation within one program only, and the body of a scan is its own.
_INSIDE: ContextVar[AttributePath] = ContextVar("clipgrad_module_path", default=())

# One class for each class and path, so that trees of one call have the structure of the next.
_CLASSES: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()
_PATH = "_clipgrad_path"  # an attribute of these classes


def with_names(run: Callable[[Callable[..., Any]], Any], fun: Callable[..., Any]) -> Any:
    """``run(fun)``, with names for the submodules of the models that the function is called with.

    A function that such models do not fit is run again without: one that joins a model with another
    from outside, as by ``equinox.combine``. Any other error of the function is the user's.
    """
    is_misfit = False

    def named(*args: Any, **kwargs: Any) -> Any:
        """The result of the function; all classes in it, and in the models, are the user's."""
        nonlocal is_misfit
        before: Classes = {}
        args = tuple(_with_names(arg, before) for arg in args)
        kwargs = {key: _with_names(arg, before) for key, arg in kwargs.items()}
        models = list(_nnx_modules([*args, *kwargs.values()]))
        result = None
        try:
            for path, module in models:
                _set_class(module, _class_at(path, module, flax_nnx().Module, before))
            result = fun(*args, **kwargs)
        except ValueError as error:
            is_misfit = bool(before) and _is_of_trees(error)
            raise
        finally:
            # Also those that the function has made of them, as by `nnx.merge`.
            for _, module in [*models, *_nnx_modules((args, kwargs, result))] if before else ():
                _set_class(module, _before(module, before))
        return _renamed(result, (), lambda module, _: _before(module, before)) if before else result

    try:
        return run(named)
    except ValueError:
        if not is_misfit:
            raise
    return run(fun)


def _is_of_trees(error: BaseException) -> bool:
    """Whether JAX has raised an error since two trees differ, as with a class of another name.

    Where JAX has taken its own frames off, the cause of the error has them.
    """
    raised = [list(traceback.walk_tb(e.__traceback__)) for e in (error, error.__cause__) if e]
    innermost = [frames[-1][0].f_globals for frames in raised if frames]
    return any(names is jax.tree_util.tree_map.__globals__ for names in innermost)


def is_equinox(x: Any) -> bool:
    return isinstance(x, getattr(sys.modules.get("equinox"), "Module", ()))


def _with_names(argument: Any, before: Classes) -> Any:
    """An argument whose Equinox modules have names; ``before`` gets the classes they had."""

    def class_of(module: Any, path: AttributePath) -> type:
        return _class_at(path, module, sys.modules["equinox"].Module, before)

    return _renamed(argument, (), class_of) if "equinox" in sys.modules else argument


def _before(module: Any, before: Classes) -> type:
    return before.get(type(module), type(module))


def _renamed(tree: Any, path: AttributePath, class_of: Callable[[Any, AttributePath], type]) -> Any:
    """A copy of a tree whose Equinox modules have other classes; the tree if it has none."""

    def is_part(x: Any) -> bool:
        return x is not tree and is_equinox(x) or is_model(x)

    entries, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_part)
    if not is_equinox(tree) and not any(is_equinox(x) for _, x in entries):
        return tree
    copy = structure.unflatten(
        _renamed(x, (*path, *_segments(keys)), class_of) if is_part(x) else x for keys, x in entries
    )
    if is_equinox(tree):
        _set_class(copy, class_of(tree, path))
    return copy


def flax_nnx() -> Any:
    """The module `flax.nnx`, or None if it is not imported."""
    return sys.modules.get("flax.nnx")


def is_model(x: Any) -> bool:
    """Whether this is a model or a variable of NNX: ``is_leaf`` for trees in which these stay."""
    return isinstance(x, tuple(getattr(flax_nnx(), n, ()) for n in ("Pytree", "Variable")))


def _segments(keys: Any) -> list[str]:
    return path_string(keys).split("/") if keys else []


def _nnx_modules(trees: Any) -> Iterator[tuple[AttributePath, Any]]:
    nnx = flax_nnx()
    leaves = jax.tree_util.tree_flatten_with_path(trees, is_leaf=is_model)[0] if nnx else ()
    seen = set()
    for keys, model in leaves:
        for path, part in list(nnx.iter_graph(model)) if is_model(model) else ():
            if isinstance(part, nnx.Module) and id(part) not in seen:
                seen.add(id(part))
                yield (*_segments(keys[1:]), *map(str, path)), part


def _set_class(module: Any, cls: type) -> None:
    if type(module) is not cls:
        object.__setattr__(module, "__class__", cls)  # both frameworks have setters of their own


def _class_at(path: AttributePath, module: Any, base: type, before: Classes) -> type:
    """The class of a module at a path; its own if it has no name or no methods.

    A class that is told of its subclasses, by an ``__init_subclass__`` of the user's, has no name.
    """
    cls = type(module)
    cls_without_names = cls.__bases__[0] if _PATH in vars(cls) else cls
    methods = _methods(cls_without_names, base)
    if not path or not methods or _hook(cls_without_names) is not _hook(base):
        return cls
    with _LOCK:
        classes = _CLASSES.setdefault(cls_without_names, weakref.WeakValueDictionary())
        named = classes.get(path)
        if named is None:
            named = _new_class(path, module, cls_without_names, methods)
        classes[path] = named
    if named is not cls:
        before[named] = cls
    return named


def _hook(cls: type) -> Any:
    return inspect.getattr_static(cls, "__init_subclass__")


def _new_class(path: AttributePath, module: Any, cls: type, methods: dict[str, Any]) -> type:
    namespace = {name: _scoped(method, path) for name, method in methods.items()} | {_PATH: path}
    namespace |= {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    # NNX makes each class a pytree, unless it is told not to.
    is_leaf = is_model(module) and jax.tree_util.all_leaves([module])
    return type(cls)(cls.__name__, (cls,), namespace, **({"pytree": False} if is_leaf else {}))


def _methods(cls: type, base: type) -> dict[str, Any]:
    """The methods by which others call a module: `__call__`, and all that are public."""
    members: dict[str, Any] = {}
    for owner in cls.__mro__:
        for name, value in () if owner in base.__mro__ else vars(owner).items():
            members.setdefault(name, value)
    if "__call__" not in members and issubclass(cls, Mapping | Sequence):
        return {}
    return {name: value for name, value in members.items() if _is_method(name, value)}


def _is_method(name: str, value: Any) -> bool:
    if name.startswith("_") and name != "__call__":
        return False
    if isinstance(value, type | staticmethod | classmethod) or not callable(value):
        return False
    returns = not inspect.isgeneratorfunction(value) and not inspect.iscoroutinefunction(value)
    return hasattr(type(value), "__get__") and returns


def _scoped(method: Any, path: AttributePath) -> Callable[..., Any]:
    """A method that enters a scope, but not where its own module calls it."""

    @functools.wraps(method, updated=())
    def scoped(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        bound, around = method.__get__(self, type(self)), _INSIDE.get()
        if around == path:
            return bound(*args, **kwargs)
        inner = path[len(around) :] if path[: len(around)] == around else path
        token = _INSIDE.set(path)
        try:
            with scope_around("/".join(inner)):
                return bound(*args, **kwargs)
        finally:
            _INSIDE.reset(token)

    return scoped
