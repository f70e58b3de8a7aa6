"""A wheel has the pages that `clipgrad help` prints and searches; docs/shipped.py says which."""

import pathlib
import shutil
import sys

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PagesHook(BuildHookInterface):
    """Writes the pages into a folder of the build, and puts that into the wheel."""

    def initialize(self, version, build_data):
        """Of an editable install the pages are those of the repository."""
        if version == "editable":
            return
        root = pathlib.Path(self.root)
        sys.path.insert(0, str(root / "docs"))
        from shipped import write_pages

        folder = root / "build" / "pages"
        shutil.rmtree(folder, ignore_errors=True)
        write_pages(root, folder)
        build_data["force_include"][str(folder)] = "clipgrad/_pages"
