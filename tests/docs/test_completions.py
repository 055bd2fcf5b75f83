"""What ``attnsel completion`` prints is what the commands and their flags make now."""

from __future__ import annotations

from completions import path_of, script
from tables import each


@each("shell", ["bash", "zsh", "fish"])
def test_the_script_is_of_these_flags(shell):
    assert path_of(shell).read_text(encoding="utf-8") == script(shell), "run docs/tools/completions.py"
