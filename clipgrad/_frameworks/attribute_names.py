"""Names of the submodules of NNX and Equinox models: their attribute paths, as named scopes.

Inside of the function that is transformed, each submodule of a model among its arguments has a
class of its own, a subclass of its class whose methods enter `jax.named_scope` with the path. In
Equinox the class is part of the tree's structure, so it goes through scans, `jax.vmap` and
`jax.checkpoint`; NNX takes it along in the same way. Outside of the function nothing changes.
"""

import functools
import inspect
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax

from clipgrad._arrays import path_string
from clipgrad._flax import has_nnx, is_model, is_module, module_class, parts_of
from clipgrad._frameworks.equinox import equinox_module_class, is_equinox
from clipgrad._names import scope_around

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
    """Calls ``run(fun)``, and the submodules of all models among the arguments have names
    meanwhile.

    If the function does not work with named models, it runs again without names. An example is a
    function that joins a model with another one from outside, as by ``equinox.combine``. Every
    other error is the user's.
    """
    failed: tuple[list[types.FrameType], Classes] | None = None

    def named(*args: Any, **kwargs: Any) -> Any:
        """The result of the function; all classes in it, and in the models, are the user's."""
        nonlocal failed
        before: Classes = {}
        args = tuple(_with_names(arg, before) for arg in args)
        kwargs = {key: _with_names(arg, before) for key, arg in kwargs.items()}
        models = list(_nnx_modules([*args, *kwargs.values()]))
        result = None
        try:
            for path, module in models:
                _set_class(module, _class_at(path, module, module_class(), before))
            result = fun(*args, **kwargs)
        except ValueError as error:
            failed = _frames_in_trees(error), before
            raise
        finally:
            # Also those that the function has made of them, as by `nnx.merge`.
            for _, module in [*models, *_nnx_modules((args, kwargs, result))] if before else ():
                _set_class(module, _before(module, before))
        return _renamed(result, (), lambda module, _: _before(module, before)) if before else result

    try:
        return run(named)
    except ValueError:
        if failed is None or not _is_of_names(*failed):
            raise
    failed = None  # with its traceback
    return run(fun)


def _frames_in_trees(error: ValueError) -> list[types.FrameType]:
    """The frames of JAX's functions of trees, if the innermost of these has raised an error.

    If JAX has removed its frames from the error, the error's cause still has them.
    """
    names = jax.tree_util.tree_map.__globals__
    for raised in (error, error.__cause__):
        frames = [frame for frame, _ in traceback.walk_tb(raised.__traceback__)] if raised else []
        if frames and frames[-1].f_globals is names:
            return [frame for frame in frames if frame.f_globals is names]
    return []


def _is_of_names(frames: list[types.FrameType], before: Classes) -> bool:
    """Whether two trees, in these frames, differ in the names of modules alone."""
    maps = [f.f_locals for f in frames if f.f_code is jax.tree_util.tree_map.__code__]
    return bool(before and frames) and (not maps or _are_alike(maps[-1], before))


def _are_alike(arguments: Mapping[str, Any], before: Classes) -> bool:
    """Whether the trees that `jax.tree.map` was called with have one form without the names."""
    trees = arguments["tree"], *arguments["rest"]
    first, *others = (_renamed(x, (), lambda module, _: _before(module, before)) for x in trees)
    structure = jax.tree.structure(first, is_leaf=arguments["is_leaf"])
    try:
        for other in others:
            structure.flatten_up_to(other)
    except ValueError:
        return False
    return True


def _with_names(argument: Any, before: Classes) -> Any:
    """The argument with named Equinox modules; ``before`` receives their classes before."""

    def class_of(module: Any, path: AttributePath) -> type:
        return _class_at(path, module, equinox_module_class(), before)

    return _renamed(argument, (), class_of) if equinox_module_class() else argument


def _before(module: Any, before: Classes) -> type:
    return before.get(type(module), type(module))


def _renamed(tree: Any, path: AttributePath, class_of: Callable[[Any, AttributePath], type]) -> Any:
    """A copy of a tree with other classes for Equinox modules; without modules the tree itself."""

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


def _segments(keys: Any) -> list[str]:
    return path_string(keys).split("/") if keys else []


def _nnx_modules(trees: Any) -> Iterator[tuple[AttributePath, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(trees, is_leaf=is_model)[0] if has_nnx() else ()
    seen = set()
    for keys, model in leaves:
        for path, part in parts_of(model) if is_model(model) else ():
            if is_module(part) and id(part) not in seen:
                seen.add(id(part))
                yield (*_segments(keys[1:]), *map(str, path)), part


def _set_class(module: Any, cls: type) -> None:
    if type(module) is not cls:
        object.__setattr__(module, "__class__", cls)  # both frameworks have setters of their own


def _class_at(path: AttributePath, module: Any, base: type, before: Classes) -> type:
    """The class of a module at a path: the present one if the module has no name or no methods.

    A class whose user wrote ``__init_subclass__`` gets no name, since that would be called.
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
