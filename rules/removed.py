"""Codes that were in use once. No other rule is given one of them, and ``attnsel rule CODE`` still answers.

A rule goes in two steps. First it is deprecated: its decorator says ``replaced_by="CUDNN204"``, and it
refuses as before. A release later the function goes, and a line comes here::

    removed("CUDNN999", release="0.3.0", replaced_by="CUDNN204", why="CUDNN204 has the true edge.")

``release``: the first one without it. ``replaced_by``: what to read instead, if anything took over. ``why``:
one or two sentences.
"""

from __future__ import annotations

from attnsel.rules.api import removed

removed(
    "CUDNN334",
    release="0.1.0",
    why="FP8 with a padded bottom-right mask was unknown because no framework uses it. From cuDNN 9.8 on the "
    "rules follow the library instead, which takes it.",
)
removed(
    "CUDNN354",
    release="0.1.0",
    replaced_by="CUDNN353",
    why="Attention sinks with FP8 waited for cuDNN 9.21.0 on Blackwell, as in TransformerEngine. The library "
    "takes them from 9.13.0 on.",
)
removed(
    "CUDNN359",
    release="0.1.0",
    why="Deterministic FP8 with attention sinks was refused, as in TransformerEngine. From cuDNN 9.8 on the "
    "rules follow the library instead, which takes it.",
)
removed("TILED002", release="0.1.0", why="tiled read no paged key/value cache. It does now.")
removed("TRITON022", release="0.1.0", why="Wide fp32 heads had not been compiled yet. They have been since.")
removed(
    "SDPA001",
    release="0.1.0",
    why="Before PyTorch 2.5 only plain attention was known. SDPA707 to SDPA732 say what each release has.",
)
for _code in (
    *("SDPA701", "SDPA702", "SDPA703", "SDPA704", "SDPA705", "SDPA706"),
    *("SDPA711", "SDPA712", "SDPA713", "SDPA714", "SDPA730"),
):
    removed(
        _code,
        release="0.1.0",
        replaced_by="INSTALL001",
        why="It was about PyTorch 2.0 or 2.1, and what is older than 2.2 is not known any more.",
    )
