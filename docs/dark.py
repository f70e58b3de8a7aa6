"""Of a picture with a dark form, `nan.png` and `nan_dark.png`, the site shows that of its theme."""

import pathlib

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class ShowInEachTheme(SphinxTransform):
    """Puts the dark form beside each picture that has one; furo shows one of the two."""

    default_priority = 5

    def apply(self, **kwargs: object) -> None:
        """Changes the pictures of this document."""
        folder = pathlib.Path(self.env.srcdir, self.env.docname).parent
        for picture in list(self.document.findall(nodes.image)):
            address = picture["uri"].removesuffix(".png") + "_dark.png"
            if (folder / address).is_file():
                dark = picture.deepcopy()
                dark["uri"] = address
                picture["classes"] += ["drawn", "only-light"]
                dark["classes"] += ["drawn", "only-dark"]
                picture.parent.insert(picture.parent.index(picture) + 1, dark)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the transform with Sphinx."""
    app.add_transform(ShowInEachTheme)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
