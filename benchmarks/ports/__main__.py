"""Scores clipgrad on mistakes of ports from torch: does it name the module?

    python -m benchmarks.ports [twins, types ...] # the table and the score
    python -m benchmarks.ports --runs=FOLDER ...  # the same of runs that are kept in a folder
    python -m benchmarks.ports --check            # the right twins, without clipgrad

Both sides of each comparison are files, of `clipgrad.torch.save_run` and of `clipgrad.save_run`:
those that are in the folder are not run again, so that a change of the comparison alone is scored
in a minute.

The check compares losses and gradients of the right twins with torch's, leaf by leaf, in float32,
or in float64 where 64 bits are on (``JAX_ENABLE_X64=1``). It says by how much each mistake moves
the loss and the gradients.
"""

import fnmatch
import itertools
import math
import os
import pathlib
import re
import sys
import tempfile
import time

from benchmarks.ports import TWINS

MARK = 7 / 8
# What flax calls whole models, and a tool may leave away.
ROOTS = ("Decoder",)
# Attributes of the Equinox twin that are no scopes of it.
ATTRIBUTES = r"/(blocks/\d+|position|token)(?=/|$)"


def arrays_of(tensors):
    """The tensors by name as NumPy arrays; those of a type that NumPy lacks in float32."""
    import torch

    out = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        out[name] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
    return out


def torch_side(twin, dtype):
    """The module, the loss and the arguments in a type."""
    import torch

    module, loss, args = twin.torch()
    to = getattr(torch, dtype)
    args = tuple(arg.to(to) if arg.is_floating_point() else arg for arg in args)
    return module.to(to), loss, args


def jax_side(twin, bug, dtype, module, args):
    """The JAX loss and its arguments, with what the torch module has."""
    import jax
    import jax.numpy as jnp

    state = arrays_of(module.state_dict())
    batch = arrays_of(dict(enumerate(args))).values()

    def cast(x):
        x = jnp.asarray(x)
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    arguments = (twin.carry(state, bug), *twin.batch(tuple(batch), state, bug))
    return twin.loss(bug), jax.tree.map(cast, arguments)


def distance(a, b):
    """The largest relative distance of two trees of one form, leaf by leaf.

    A leaf below a thousandth of the largest counts as that: a gradient may be zero but for
    rounding, as of the bias of keys.
    """
    import jax
    import numpy as np

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    whole = max(np.linalg.norm(y) for _, y in pairs)
    return max(
        np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-3 * whole, 1e-30) for x, y in pairs
    )


def check(chosen):
    """Whether each right twin has torch's loss and gradients, and each mistake has not."""
    import jax

    limits = {"float32": 2e-5, "bfloat16": 0.2}
    if jax.config.jax_enable_x64:
        limits = {"float64": 1e-12}
    wrong = 0
    for twin, dtype in itertools.product(TWINS, limits):
        if chosen and twin.name not in chosen:
            continue
        module, torch_loss, args = torch_side(twin, dtype)
        value = torch_loss(module, *args)
        value.backward()
        named = dict(module.named_parameters(remove_duplicate=False))
        grads = arrays_of({name: parameter.grad for name, parameter in named.items()})
        expected = jax.tree.leaves(twin.carry(grads, "", True))
        # The averages of BatchNorm are those before the run.
        module, _, args = torch_side(twin, dtype)
        for bug in ("", *(twin.bugs if dtype != "bfloat16" else ())):
            fun, arguments = jax_side(twin, bug, dtype, module, args)
            loss, found = jax.jit(jax.value_and_grad(fun))(*arguments)
            of_loss = distance(loss, value.item())
            found = jax.tree.leaves(found)
            same = [x.shape for x in found] == [x.shape for x in expected]
            of_grads = distance(found, expected) if same else float("nan")
            good = same and max(of_loss, of_grads) < limits[dtype]
            wrong += good == bool(bug)
            print(
                f"{twin.name:11} {bug or '(right)':22} {dtype:8} loss {of_loss:.1e} "
                f"gradients {of_grads:.1e}  {'' if good != bool(bug) else 'NOT AS IT SHOULD BE'}",
                flush=True,
            )
    print("wrong:", wrong)
    return wrong


def is_at(module, names):
    """Whether a scope is one of the names.

    What a framework puts into a name beside the model's own scopes does not count: the name of the
    whole model before it, ``vmap()``, ``cell.scan_fn``, names that Equinox gives its own layers,
    such as ``eqx.nn.Linear``, and the paths of attributes that clipgrad gives modules of Equinox.
    """
    parts = [part for part in (module or "").split("/") if part and part != "vmap()"]
    parts = [
        part for part in parts if not part.startswith("eqx.nn.") and not part.endswith(".scan_fn")
    ]
    if parts and parts[0] in ROOTS:
        del parts[0]
    bare = "/".join(part for part, _ in itertools.groupby(parts))
    bare = re.sub(ATTRIBUTES, "", bare)
    bare = "/".join(part for part, _ in itertools.groupby(bare.split("/")))
    return any(fnmatch.fnmatchcase(own, name) for name in names for own in ("/".join(parts), bare))


def judged(found, bug):
    """Whether the first finding names the place, or one of the wrong leaves; and what it is."""
    if not found.findings:
        return False, "nothing"
    first = found.findings[0]
    text = f"{first.kind} {first.module}: {first.message}"
    words = str(first.message).replace("['", "/").replace("']", "").split()
    words = ["/" + word.strip(".,:;()[]'\"`/") for word in words]
    leaf = any(fnmatch.fnmatchcase(word, "*/" + leaf) for word in words for leaf in bug.leaves)
    return not found.ok and (is_at(first.module, bug.modules) or leaf), text


def written(twin, dtype, folder):
    """Writes the runs of a twin that are not yet in a folder; their paths by mistake.

    The torch run has the key "torch", the right twin the key "".
    """
    import clipgrad as cg
    import clipgrad.torch

    names = {"torch": "torch", "": "right"} | {bug: bug for bug in twin.bugs}
    paths = {key: folder / f"{twin.name}-{dtype}-{name}.npz" for key, name in names.items()}
    module, torch_loss, args = torch_side(twin, dtype)
    if not paths["torch"].exists():
        before = {name: value.clone() for name, value in module.state_dict().items()}
        clipgrad.torch.save_run(module, torch_loss, args, paths["torch"])
        # The averages of BatchNorm are those before the run.
        module.load_state_dict(before)
    for bug, path in paths.items():
        if bug != "torch" and not path.exists():
            fun, arguments = jax_side(twin, bug, dtype, module, args)
            cg.save_run(fun, arguments, path)
    return paths


def scored(twin, dtype, paths):
    """Whether each mistake is named and the right twin is not, with a text for each."""
    import clipgrad as cg

    for bug in ("", *twin.bugs):
        try:
            found = cg.compare(paths["torch"], paths[bug])
            if bug:
                at, text = judged(found, twin.bugs[bug])
            else:
                at = found.ok and not found.findings
                text = " | ".join(str(f.message) for f in found.findings) or "silent"
        except Exception as error:
            at, text = False, f"{type(error).__name__}: {error}"
        modules = [module or "the model" for module in twin.bugs[bug].modules] if bug else []
        expected = f"{' or '.join(modules)} ({twin.bugs[bug].what})" if bug else "silent"
        text = " ".join(text.split()).replace(os.getcwd() + "/", "")[:400]
        verdict = "right" if at else "WRONG"
        print(
            f"{twin.name:11} {bug or '(right)':22} {dtype:8} {verdict}    {expected} | {text}",
            flush=True,
        )
        yield bug, at


def main(chosen, folder):
    """The table and the score in each type."""
    types = ("float32", "bfloat16")
    twins = [twin for twin in TWINS if twin.name in chosen or not {*chosen} - {*types}]
    print(f"{'twin':11} {'mistake':22} {'type':8} verdict  expected | found")
    scores = []
    for dtype in [dtype for dtype in types if dtype in chosen or not {*types} & {*chosen}]:
        rows = []
        for twin in twins:
            start = time.process_time()
            rows += scored(twin, dtype, written(twin, dtype, folder))
            print(f"{twin.name:11} {dtype}: {time.process_time() - start:.0f} s", file=sys.stderr)
        named, silent = ([at for bug, at in rows if bool(bug) == which] for which in (True, False))
        mark = math.ceil(MARK * len(named))
        scores.append(f"{dtype}: at the module {sum(named)} of {len(named)}, the mark is {mark}")
        scores[-1] += f"; right twins that are named {silent.count(False)} of {len(silent)}"
    print("\n".join(scores))


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    kept = [name.removeprefix("--runs=") for name in sys.argv if name.startswith("--runs=")]
    with tempfile.TemporaryDirectory() as temporary:
        where = pathlib.Path(*kept or [temporary])
        where.mkdir(exist_ok=True)
        sys.exit(check(names) > 0) if "--check" in sys.argv else main(names, where)
