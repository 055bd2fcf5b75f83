"""What diffusers says of an attention backend that it cannot give.

Read: diffusers 0.42.1 (models/attention_dispatch.py, models/modeling_utils.py).
"""

from __future__ import annotations

from attnsel.diagnose.logs.message import FirstOf, error
from attnsel.diagnose.logs.parsers.flash_attn import REBUILD

_DISPATCH = "diffusers 0.42.1, models/attention_dispatch.py"

NATIVE = 'model.set_attention_backend("native"), which takes masks'

_MESSAGES = (
    error(
        pattern=r"`?attn_mask`? is not (?:yet )?supported for (?P<backend>flash-attn (?:[234]|(?:varlen "
        r")?hub)|sage|Sage|native flash|aiter|XLA)[\w -]{0,40}",
        known="the model passes a mask and {backend} takes none: diffusers refuses rather than drop it. "
        "Where the mask hides nothing (a single prompt without padding) the model's code could pass None",
        codes=("SDPA101",),
        fix=(
            NATIVE,
            'set_attention_backend("flash_varlen"), which packs a padding mask',
            "a batch of equal prompts",
        ),
        source=f"{_DISPATCH}:3038, 3094, 3294, 3499, 4066; huggingface/diffusers#13801, "
        "Tongyi-MAI/Z-Image#117",
    ),
    error(
        pattern=r"`?(?P<what>enable_gqa|dropout_p|return_lse)`? is not (?:yet )?supported (?:for|by) "
        r"(?P<backend>[\w `.-]{3,60})",
        known="{backend} has no {what}",
        fix=NATIVE,
        source=f"{_DISPATCH}:958, 1089, 1197, 1624, 1977",
    ),
    error(
        pattern=r"(?:[\w ]{0,30}[Bb]ackend|Backend) '(?P<backend>\w{1,60})' is not usable because (?:of "
        r"missing package or the version is too old|the `(?P<package>\w{1,60})` package isn't available)",
        known='what set_attention_backend("{backend}") needs is not installed, or is too old',
        codes=("INSTALL005",),
        fix=(
            "what the message names; without a build: pip install kernels and the backend's _hub form",
            NATIVE,
        ),
        source=f"{_DISPATCH}:539 to 607",
    ),
    error(
        pattern=r"Backend '(?P<backend>\w{1,60})' needs to be used with a `kernels` version of at least "
        r"(?P<least>[\d.]{1,120}\d)",
        known="the package kernels is older than {least}",
        fix="pip install -U kernels",
        source=f"{_DISPATCH}:565",
    ),
    error(
        pattern=r"Kernel module '(?P<module>[\w.]{1,120})' does not define attribute path "
        r"'(?P<path>[\w.]{1,120})'",
        known="the kernel that the Hub gives now no longer has the name that this diffusers asks it for "
        "({path})",
        fix=("a newer diffusers", 'set_attention_backend("native"), or "flash" with the flash-attn package'),
        source=f"{_DISPATCH}:726; huggingface/diffusers#14012, PKU-YuanGroup/Helios#140",
    ),
    error(
        pattern=r"(?P<package>flash_attn(?:_3)?|sageattention|xformers) (?:is installed but )?failed to "
        r"import: (?P<why>[^\n]{3,120})\. Falling back to native",
        known="{package} is installed and does not load; diffusers goes on with F.sdpa: {why}",
        codes=("INSTALL005",),
        fix=REBUILD,
        source=f"{_DISPATCH}:89, 107, 126, 183",
    ),
    error(
        "does not support context parallelism. Please set a compatible attention backend",
        known="this backend cannot be spread over ranks",
        fix="set_attention_backend with one of those that the message lists, before enable_parallelism",
        source="diffusers 0.42.1, models/modeling_utils.py:651, 1803",
    ),
    error(
        pattern=r"Query, key, and value must be (?:either bfloat16 or float16|bfloat16)",
        params={"dtype": "fp32"},
        known="q, k and v are not in half precision, which this backend needs",
        codes=("FLASH200", "HINT005"),
        fix="torch_dtype=torch.bfloat16 in from_pretrained, or pipe.to(torch.bfloat16)",
        source=f"{_DISPATCH}:503, 509",
    ),
    error(
        pattern=r"must be on a CUDA device with compute capability >= (?P<least>\d{1,9}\.\d)",
        known="this backend needs compute capability {least}",
        fix=NATIVE,
        source=f"{_DISPATCH}:479",
    ),
    error(
        pattern=r"`?backend='?(?P<backend>\w{1,60})'?`? must be one of the following",
        known="diffusers has no attention backend of that name",
        fix="one of those that the message lists",
        source="diffusers 0.42.1, models/modeling_utils.py:645",
    ),
)

LIBRARIES = (FirstOf("diffusers", "refusals of set_attention_backend", _MESSAGES),)
