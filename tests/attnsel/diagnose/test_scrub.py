"""What never leaves a log: many of each kind, bare, quoted, in a path, a URL or a message."""

from __future__ import annotations

import json
from pathlib import Path

from attnsel.diagnose.logs.answer import Stated, explained
from attnsel.diagnose.logs.calls import gather
from attnsel.diagnose.logs.report import log_document
from attnsel.diagnose.scrub import scrub
from attnsel.report.markdown import to_markdown
from attnsel.report.text import to_text

IN = ("{}", "'{}'", "token: {}", "HF_TOKEN={}", "Authorization: Bearer {}", "https://user:{}@host/x", "/{}/x")

LINES = [line.split("\t") for line in Path(__file__).with_name("private.txt").read_text().splitlines()]
"""What stands before a tab holds what stands behind it, which is nobody's business; other lines stay."""
NAMES = [(text, private[0]) for text, *private in LINES if private]
SECRETS = [text for text, private in NAMES if text == private]
KEPT = [text for text, *private in LINES if not private]


def test_what_is_private_is_taken_out_wherever_it_stands() -> None:
    texts = [(f"before {around.format(secret)} after", secret) for secret in SECRETS for around in IN]
    texts += [
        (line.format(text), private) for text, private in NAMES for line in ("{}", "at {} here", "[{}]")
    ]
    for text, private in texts:
        assert private not in scrub(text)
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\nAAAA\n-----END OPENSSH PRIVATE KEY-----"
    assert scrub(f"x {key} y") == "x <secret> y"


def test_what_a_message_is_about_stays() -> None:
    assert [scrub(text) for text in KEPT] == KEPT
    scrubbed = [scrub(text) for text in (*SECRETS, *(text for text, _ in NAMES))]
    assert [scrub(text) for text in scrubbed] == scrubbed, "what is taken out is taken out once"


def test_nothing_private_of_a_message_reaches_report_or_json() -> None:
    """Messages end in whatever is behind them, and configurations hold any value."""
    for private in ("hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345", "/home/jane/x"):
        log = (
            f"Running with config={{'transformer_engine_version': '2.8.0', 'head_dim_qk': '{private}', "
            f"'compute_capability': '{private}', 'my_note': '{private}', 'attn_mask_type': 'causal'}}\n"
            f"Disabling FusedAttention as {private} is so\n"
            f"RuntimeError: cuDNN Frontend error: [cudnn_frontend] Error: {private}\n"
            f"PyTorch version: 2.5.1 {private}\n"
        )
        answered = explained(gather(log.splitlines(keepends=True)), Stated())
        assert answered.answers
        document = log_document(answered)
        told = [to_text(document), to_markdown(document), json.dumps(answered.as_dict())]
        assert [text for text in told if private in text.replace("\n", "").replace("\\", "")] == []


def test_a_text_of_any_length_is_scrubbed_and_cut() -> None:
    for piece in ("a", "a.", "/a", " ", "a@", "1.", "Aa1", "-----BEGIN ", "token ", "://"):
        assert len(scrub(100_000 * piece)) <= 20_000, piece
    assert scrub(30_000 * "step ").startswith("step step step")
