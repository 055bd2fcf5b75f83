"""What JAX says of cuDNN's attention (``jax.nn.dot_product_attention(implementation="cudnn")``).

Read: jax 0.10.2, _src/cudnn/fused_attention_stablehlo.py and _src/nn/functions.py.
"""

from __future__ import annotations

from attnsel.diagnose.logs.message import FirstOf, declared

LIBRARIES = (
    FirstOf("JAX", "refusals of implementation='cudnn'", declared("jax", "JAX"), ("cudnn",)),
    FirstOf("attention", "", declared("serving", "attention")),  # last: what nobody else knows
)
