"""How q, k and v lie in memory: the names of layouts, and what tensors say of themselves.

``names``    TransformerEngine's 26 names and what they mean
``detect``   the layout of three tensors, from their strides, offsets and storages
``tensors``  what one tensor says of itself; ``packing`` buffers that hold several
``overlap``  whether strided tensors meet in memory
``describe`` a layout as text
"""

from attnsel.params.layout.detect import Layout, detect_layout
from attnsel.params.layout.names import FORMATS, LAYOUTS, Format, LayoutName, QkvFormat, read_layout
from attnsel.params.layout.packing import Row
from attnsel.params.layout.tensors import TensorLayout

__all__ = [
    "FORMATS",
    "LAYOUTS",
    "Format",
    "Layout",
    "LayoutName",
    "QkvFormat",
    "Row",
    "TensorLayout",
    "detect_layout",
    "read_layout",
]
