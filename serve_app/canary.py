"""A real image, small enough to ask an encoder with whether it answers."""

import io

from PIL import Image

from serve_app.service import ImageItem


def _gradient_png() -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((32, 32)).save(file, "PNG")
    return file.getvalue()


CANARY = ImageItem("canary", _gradient_png())
