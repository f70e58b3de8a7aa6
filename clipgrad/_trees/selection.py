"""The names of arguments."""


def argument_name(which: int | str) -> str:
    """An argument as `leaf_names` begin: `args[0]`, `kwargs['x']`."""
    return f"args[{which}]" if isinstance(which, int) else f"kwargs[{which!r}]"
