"""``--html``: one file that asks for nothing, in which markup is text and every code of the answer stands."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from attnsel.cli import FOUND, main

MARKUP = '"><script>alert(1)</script></script><img src=x onerror=alert(2)>'
COMMANDS = [
    "explain --gpu H100 --softcap 30 --head-dim 100 --as te",
    "explain --gpu H100 --model MODEL",
    "compare A100 T4 --model MODEL",
    "can-i-use softcap dropout --gpu T4",
    "can-i-use --gpu H100 --rows head_dim_qk=64,512 --cols attn_mask_type=causal,padding_causal",
]


class Read(HTMLParser):
    """What a page holds: its tags, what is read of it, the record, and what it fetches."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.record, self.fetched, self.last = [], "", "", [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags, self.last = [*self.tags, tag], tag
        fetching = {"src", "srcset", "data", "action"} | ({"href"} if tag == "link" else set())
        self.fetched += [value for name, value in attributes if name in fetching]
        self.words += f" {dict(attributes).get('aria-label', '')}"

    def handle_data(self, data):
        if self.last == "script":
            self.record += data if data.startswith("{") else ""
        elif self.last != "style":
            self.words += data

    def handle_endtag(self, tag):
        self.last = ""


@pytest.mark.parametrize("line", COMMANDS)
def test_the_page_holds_the_whole_answer_and_asks_for_nothing(line, tmp_path, capsys):
    config = {"model_type": f"llama{MARKUP}", "num_attention_heads": 32, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4, "sliding_window": 8}))
    words, page = line.replace("MODEL", str(tmp_path)).split(), tmp_path / "page.html"
    assert main([*words, "--json", "--html", str(page)]) == FOUND
    printed = json.loads(capsys.readouterr().out)
    read = Read(text := page.read_text(encoding="utf-8"))
    assert json.loads(read.record) == printed
    assert set(re.findall(r"\b[A-Z]{2,}\d{3}\b", json.dumps(printed))) <= set(re.findall(r"\w+", read.words))
    assert read.fetched == ["data:,"]
    assert not re.search(r"@import|url\(", text)
    assert (read.tags.count("script"), read.tags.count("img"), read.tags.count("h1")) == (2, 0, 1)
    assert MARKUP in read.words or not line.startswith("explain --gpu H100 --model")
    assert main([*words, "--html", "-"]) == FOUND
    assert json.loads(Read(capsys.readouterr().out).record) == printed
