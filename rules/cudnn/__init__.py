"""cuDNN fused attention.

Before 9.8 the library cannot be asked about a GPU that is not there: those rules follow the sources of
TransformerEngine and cudnn-frontend (``before_9_8_*``). From 9.8 on it can, and it is the judge
(``since_9_8_*``). FP8 stands apart (``fp8*``): other kernels, other limits.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
