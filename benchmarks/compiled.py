"""What a program that was compiled for an accelerator sends to the host."""

import re

# A callback, a feed, a message to the host, or an array in the host's memory, the fifth space.
HOST = re.compile(
    r"callback|infeed|outfeed|is_host_transfer=true| (?:send|recv)[(]|S\(5\)|MoveToHost"
)


def host_transfers(text: str) -> list[str]:
    """The lines of a compiled program that talk to the host."""
    lines = re.sub(r"metadata={[^}]*}", "", text).splitlines()
    return [line for line in lines if HOST.search(line)]
