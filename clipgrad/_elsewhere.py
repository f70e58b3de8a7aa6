"""Names that somebody may look for here, so that an error can say the name that there is."""

import difflib
from collections.abc import Mapping

# The names of torch and optax that are used most.
NAMES = {
    "apply_if_finite": "skip_spikes(optimizer)",
    "clip": "clip_by_value(max)",
    "clip_grad_norm_": "clip_grads(grads, ClipByGlobalNorm(max_norm)), or clip_by_global_norm",
    "clip_grad_value_": "clip_grads(grads, ClipByValue(max)), or clip_by_value",
    "grad_norm": "global_norm(grads)",
    "gradcheck": "check_grads(fun, args)",
}


def hint(name: str, public: Mapping[str, str]) -> str:
    """A hint for a name that is not here: its name here, or the public name most like it.

    ``public`` has the module of each public name.
    """
    if ours := {_letters(theirs): ours for theirs, ours in NAMES.items()}.get(_letters(name)):
        return f"; write clipgrad.{ours}"
    found = difflib.get_close_matches(_letters(name), map(_letters, public), n=1, cutoff=0.8)
    if not found:
        return ""
    same = [own for own in public if _letters(own) == found[0]]  # ClipByNorm and clip_by_norm
    near = max(same, key=lambda own: difflib.SequenceMatcher(None, name, own).ratio())
    return f"; write {public[near]}.{near}"


def _letters(name: str) -> str:
    return name.lower().replace("_", "")
