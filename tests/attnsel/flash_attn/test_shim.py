"""The name ``flash_attn`` in this process: taken where no package works under it, and restored."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys

import pytest

import attnsel.flash_attn as api
from attnsel.flash_attn import bert_padding, interface, rotary, shim


@pytest.fixture(autouse=True)
def _as_before():
    if shim._real_package() is not None:
        pytest.skip("a real flash_attn is installed here")
    yield
    shim.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """``package({"__init__.py": "…"})`` writes a package flash_attn that is found first."""

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            file = tmp_path / "flash_attn" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    return write


ONLY_IMPORT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); import flash_attn"


def test_every_name_is_found_where_there_is_no_package_until_uninstalled(caplog):
    caplog.set_level(logging.INFO, "attnsel")
    assert not shim.uninstall()
    installed = api.install()
    assert installed.names == shim.NAMES
    assert installed.version == api.__version__
    assert "not installed" in installed.why

    import flash_attn
    import flash_attn.bert_padding
    from flash_attn.flash_attn_interface import _flash_attn_forward
    from flash_attn.layers.rotary import apply_rotary_emb

    for name in api.__all__:
        if name.startswith("flash_attn"):
            assert getattr(flash_attn, name) is getattr(api, name)
    assert flash_attn.__version__ == api.__version__
    assert flash_attn.bert_padding is bert_padding
    assert flash_attn.flash_attn_interface is interface
    assert _flash_attn_forward is interface._flash_attn_forward
    assert apply_rotary_emb is rotary.apply_rotary_emb
    for name in shim.NAMES:
        assert importlib.util.find_spec(name) is not None, name  # how libraries look before they import
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.losses")

    assert api.install() is installed
    assert sys.modules["flash_attn"] is flash_attn
    assert [record.getMessage() for record in caplog.records] == [str(installed)]
    assert shim.uninstall()
    assert not set(shim.NAMES) & set(sys.modules)
    with pytest.raises(ImportError):
        from flash_attn import flash_attn_func  # noqa: F401


def test_a_package_that_works_is_kept_unless_forced(package, monkeypatch, caplog):
    """And brought back by uninstall."""
    package({"__init__.py": "__version__ = '2.8.3'\ndef flash_attn_func(*_): return 'real'\n"})
    monkeypatch.setattr(shim, "_PROBE", ONLY_IMPORT)
    caplog.set_level(logging.INFO, "attnsel")
    assert api.install() is None
    assert "works here" in caplog.text
    real = importlib.import_module("flash_attn")
    assert real.flash_attn_func() == "real"
    installed = api.install(force=True)
    assert "force" in installed.why
    assert sys.modules["flash_attn"].flash_attn_func is api.flash_attn_func
    shim.uninstall()
    assert importlib.import_module("flash_attn") is real


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise RuntimeError('FlashAttention only supports Ampere GPUs or newer.')", "only supports Ampere"),
        ("import flash_attn_2_cuda_that_nobody_has", "No module named 'flash_attn_2_cuda_that_nobody_has'"),
        ("import os; os._exit(9)", "exit code 9"),
    ],
)
def test_a_package_that_refuses_is_replaced_and_its_error_is_the_reason(package, source, error):
    package({"__init__.py": source})
    installed = api.install()
    assert error in installed.why
    assert sys.modules["flash_attn"].flash_attn_func is api.flash_attn_func


def test_what_else_a_refused_package_holds_stays_and_gets_our_functions(package):
    package(
        {
            "__init__.py": "raise ImportError('undefined symbol')",
            "losses/__init__.py": "from flash_attn import flash_attn_func",
            "layers/__init__.py": "",
            "layers/patch_embed.py": "WIDTH = 4",
        }
    )
    api.install()
    assert importlib.import_module("flash_attn.losses").flash_attn_func is api.flash_attn_func
    assert importlib.import_module("flash_attn.layers.patch_embed").WIDTH == 4


@pytest.mark.parametrize("loaded", [False, True])
def test_flash_attention_4_alone_is_no_flash_attention_2_and_is_left_alone(package, loaded):
    package({"cute/__init__.py": "flash_attn_func = 'four'"})
    before = importlib.import_module("flash_attn.cute") if loaded else None
    installed = api.install()
    assert "not installed" in installed.why
    cute = importlib.import_module("flash_attn.cute")
    assert cute.flash_attn_func == "four"
    assert before is None or cute is before
    assert sys.modules["flash_attn"].cute is cute
    shim.uninstall()
    assert importlib.import_module("flash_attn.cute") is cute


def test_a_package_that_never_answers_is_not_known_to_refuse(package, monkeypatch, caplog):
    package({"__init__.py": "import time; time.sleep(60)"})
    monkeypatch.setattr(shim, "_PROBE", ONLY_IMPORT)
    monkeypatch.setattr(shim, "_PROBE_SECONDS", 0.2)
    assert api.install() is None
    assert "did not answer" in caplog.text
