"""What transformers says of an attention implementation that it cannot give.

Read: transformers 5.23.0 (modeling_utils.py, integrations/sdpa_attention.py, flash_attention.py,
flex_attention.py, hub_kernels.py); older wordings from the issues named.
"""

from __future__ import annotations

from attnsel.diagnose.logs.message import FirstOf, Message, error
from attnsel.diagnose.logs.parsers.flash_attn import CAST, REBUILD

_MODELING = "transformers 5.23.0, modeling_utils.py"

SDPA = 'attn_implementation="sdpa" in from_pretrained'
EAGER = 'attn_implementation="eager" in from_pretrained, or model.set_attn_implementation("eager")'
HUB = (
    "a kernel from the Hub instead of a build: pip install kernels, then "
    'attn_implementation="kernels-community/'
    'flash-attn2" (flash_attention_2 falls back to it by itself in transformers 5)'
)

_MESSAGES = (
    error(
        " has been toggled on, but it cannot be used due to the following error: the package f",
        r"FlashAttention ?(?P<version>[234]) has been toggled on, but it cannot be used due to the following "
        r"error: (?:the package (?:flash_attn|for FlashAttention\d?) (?:seems to be not|doesn't seem to be) "
        r"installed)",
        known="flash_attention_{version} was asked for and its package is not there (transformers looks "
        "for the distribution flash-attn, not for the module alone)",
        codes=("INSTALL005",),
        fix=(REBUILD, HUB, SDPA),
        source=f"{_MODELING}:1554 to 1559; 4.36 to 4.57, _check_and_enable_flash_attn_2",
    ),
    error(
        ("you need flash_attn package version", "requires at least version"),
        r"FlashAttention ?(?P<version>[234]) has been toggled on[^\n]{0,120}(?:you need flash_attn package "
        r"version|requires at least version)[^\n\d]{0,40}(?P<least>\d[\d.]{0,8}\d)",
        known="the installed flash-attn is older than {least}, the least that transformers calls",
        codes=("FLASH201",),
        fix=("pip install -U flash-attn --no-build-isolation", SDPA),
        source=f"{_MODELING}:1563",
    ),
    error(
        pattern=r"FlashAttention(?P<version>[234]) requires compute capability >= "
        r"(?P<least>\d{1,9})[^\n]{0,40}\((?P<major>\d{1,9}), (?P<minor>\d)\)",
        known="flash_attention_{version} needs compute capability {least}.0, the GPU has {major}.{minor}",
        codes=("FLASH301", "FLASH402"),
        fix=('attn_implementation="flash_attention_2" on Ampere and Ada', SDPA),
        source=f"{_MODELING}:1576",
    ),
    error(
        pattern=r"FlashAttention(?P<version>[234]) is not available on CPU",
        known="FlashAttention runs on GPUs only",
        fix=SDPA,
        source=f"{_MODELING}:1569",
    ),
    error(
        pattern=r"(?P<model>\w{3,60}) does not support Flash Attention (?P<version>[\d.]{1,40}) yet",
        known="transformers' code of {model} has no FlashAttention (the model's class says so); it is "
        "neither the GPU nor the installation",
        fix=(
            "a newer transformers, where the class may have it; a model with trust_remote_code has it when "
            "its own code does",
            SDPA,
        ),
        source=f"{_MODELING}:1594; 4.35 to 4.57; huggingface/transformers#28704",
    ),
    error(
        " does not support an attention implementation through torch",
        r"(?P<model>\w{3,60}) does not support an attention implementation through (?:torch\.nn\.functional\."
        r"scaled_dot_product_attention yet|torch's flex_attention)",
        known="transformers' code of {model} does not go through F.sdpa (the model's class says so)",
        fix=(EAGER, "a newer transformers, where the class may have it"),
        source=f"{_MODELING}:1667, 1698; lyogavin/airllm#101",
    ),
    error(
        pattern=r"(?:`?sdpa`? attention|scaled_dot_product_attention`?|Flash Attention) does not support "
        r"`?output_attentions=True`?|`output_attentions` attribute is not supported when using the "
        r"`attn_implementation` set to",
        known="output_attentions=True asks for the probabilities, which no fused kernel computes: releases "
        "before 5 fall back to eager attention without further notice, newer ones give none or raise",
        fix=(f"output_attentions=False where the probabilities are not used, else {EAGER}",),
        source="transformers 5.23.0, integrations/sdpa_attention.py:114, flash_attention.py:44; "
        "huggingface/transformers#31990",
    ),
    error(
        "Falling back to the manual attention implementation",
        known="transformers falls back to eager attention for these arguments",
        fix="the call without them (head_mask, layer_head_mask, output_attentions)",
        source="transformers 4.36 to 4.47, models/*/modeling_*.py",
    ),
    error(
        pattern=r"`?(?:sdpa|flex_attention)`? attention does not support `?(?P<what>softcap|dropout)`?|"
        r"`flex_attention` does not support `dropout`",
        known="this implementation does not have what the model's configuration asks for",
        codes=("SDPA004",),
        fix='attn_implementation="eager", "flash_attention_2" or, for softcap, "flex_attention"',
        source="transformers 5.23.0, integrations/sdpa_attention.py:110, flex_attention.py:272",
    ),
    error(
        pattern=r"You are attempting to use Flash Attention (?P<version>[\d.]{1,40}) without specifying a "
        r"(?:torch )?dtype",
        known="no dtype was given, so that the weights may be fp32, which FlashAttention refuses",
        codes=("HINT005",),
        fix="dtype=torch.bfloat16 in from_pretrained (torch_dtype before transformers 5)",
        source=f"{_MODELING}:1618",
    ),
    error(
        pattern=r"Flash Attention (?P<version>[\d.]{1,40}) only supports torch\.float16 and torch\.bfloat16 "
        r"dtypes",
        params={"dtype": "fp32"},
        known="the weights are fp32, and FlashAttention computes in fp16 and bf16",
        codes=("FLASH200", "HINT005"),
        fix=CAST,
        source=f"{_MODELING}:1622",
    ),
    Message(
        pattern=r"You are attempting to use Flash Attention (?P<version>[\d.]{1,40}) with a model not "
        r"initialized on GPU",
        kind="note",
        known="the model was loaded on the CPU; it has to be moved before the first call",
        source=f"{_MODELING}:1638",
    ),
    error(
        ('Specified `attn_implementation="', "` is not a valid attention implementation"),
        r"(?:Specified `attn_implementation=\"(?P<name>[\w|/.-]{1,80})\"` is not "
        r"supported|`(?P<other>[\w|/.-]{1,80})` is not a valid attention implementation)",
        known="no attention implementation of that name is registered",
        fix='"sdpa", "eager", "flash_attention_2", "flex_attention", or a kernel of the Hub as owner/name',
        source=f"{_MODELING}:1849, 5268",
    ),
    Message(
        pattern=r"You do not have `flash_attn` installed, using `(?P<name>[\w/.@-]{3,80})`",
        kind="chosen",
        source=f"{_MODELING}:1810",
    ),
    error(
        "kernels hub usage is disabled through the environment USE_HUB_KERNELS",
        known="kernels of the Hub are switched off by USE_HUB_KERNELS",
        fix="unset USE_HUB_KERNELS",
        source="transformers 5.23.0, integrations/hub_kernels.py:112",
    ),
    error(
        pattern=r"An error occurred while trying to load from '(?P<name>[\w/.@-]{3,80})'",
        known="the kernel {name} of the Hub does not load: it has no build for this torch, CUDA or GPU, or "
        "there is no network",
        fix=(SDPA, "pip install -U kernels; a torch that the kernel's page lists"),
        source="transformers 5.23.0, integrations/hub_kernels.py:873",
    ),
)


LIBRARIES = (FirstOf("transformers", "refusals of attn_implementation", _MESSAGES),)
