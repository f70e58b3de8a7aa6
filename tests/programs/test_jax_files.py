"""The forms of JAX that no public name stands for are there: files, wrappers, attributes.

A test that fails here names the line to change when JAX moves or renames one.
"""

import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from clipgrad._names import places

JAX = pathlib.Path(jax.__file__ or "").parent


def installed(package):
    """The folder that a package is installed in; the test is skipped without it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        pytest.skip(f"{package} is not installed")
    return pathlib.Path(spec.origin).parents[1]


def test_the_files_of_jax_that_a_location_skips_exist():
    there = {path.name for path in (JAX / "_src").rglob("*.py")}
    assert places._MACHINERY - there == set()


@pytest.mark.parametrize("folder", [*places._FOLDERS, *getattr(places, "_FRAMES_OF_LAYERS", ())])
def test_the_folders_and_files_that_places_know_exist(folder):
    parts = pathlib.PurePath(folder.strip("/")).parts
    path = installed(parts[0]).joinpath(*parts)
    assert path.exists() or path.with_suffix(".py").exists()


def test_the_wrappers_of_jax_that_are_no_functions_of_its_own_exist():
    folders = [JAX.parent / folder for folder in places._FOLDERS if folder.startswith("jax")]
    texts = [p.read_text() for folder in (*folders, JAX / "_src") for p in folder.glob("*.py")]
    defined = {name for text in texts for name in re.findall(r"def (\w+)\(", text)}
    assert places._WRAPPERS - defined == set()


def test_tracers_have_the_two_attributes_that_closures_read():
    """The one use of attributes that JAX does not document, see `_programs/closures.py`."""
    seen = []
    program = jax.make_jaxpr(lambda x: seen.append(y := jnp.sin(x)) or y)(1.0)
    (tracer,) = seen
    assert tracer.val is program.jaxpr.outvars[0]
    assert tracer.parent.outvars[0] is tracer.val
    assert tracer.parent.params is program.jaxpr.eqns[0].params
