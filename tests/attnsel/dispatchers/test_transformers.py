"""What transformers would choose, against the transformers that is installed. Other releases: answers.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnsel import AttentionParams, Environment
from attnsel.dispatchers import dispatched_by
from attnsel.environment.versions import Version
from tables import each

CPU = Environment.describe("cpu", torch="2.13.0")
FLAGS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")


def test_the_call_of_f_sdpa_is_what_the_installed_release_makes() -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.20")
    from transformers_function import calls

    root = Path(transformers.__file__).parent
    assert list(calls(Version.parse(transformers.__version__), root, 100, seed=1)) == []


NAMES = [None, "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention", "paged|eager"]
NAMES += ["nonsense", "kernels-community/flash-attn2"]


@each("supports", [True, False])
@each("name", NAMES)
def test_the_name_resolves_as_in_the_installed_release(name, supports, monkeypatch):
    transformers = pytest.importorskip("transformers", minversion="5.20")
    pytest.importorskip("torch")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    for flag in FLAGS:
        monkeypatch.setattr(transformers.LlamaPreTrainedModel, flag, supports)
    flags = dict.fromkeys(FLAGS, str(supports).lower())
    switches = {"kernels": "false", "transformers": transformers.__version__, **flags}
    switches |= {} if name is None else {"attn_implementation": name}
    answer = dispatched_by("transformers", AttentionParams(is_training=False), CPU, switches)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
        found = model.config._attn_implementation.removeprefix("paged|")
    except (ImportError, ValueError):
        found = None
    assert (None if answer.chosen is None else answer.chosen.name) == found
