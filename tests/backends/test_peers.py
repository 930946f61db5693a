"""What of torch and its neighbours is here."""

import sys
from types import SimpleNamespace

import pytest

from roofline.bench.peers import available as module
from roofline.bench.peers.available import here
from roofline.common.errors import UnsupportedError


def torch_with(gpu, hip=None):
    cuda = SimpleNamespace(is_available=lambda: gpu, get_device_name=lambda: "a GPU")
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip))


@pytest.mark.parametrize(("hip", "vendor"), [(None, "nvidia"), ("6.0", "amd")])
def test_a_gpu_has_its_vendor(monkeypatch, hip, vendor):
    monkeypatch.setitem(sys.modules, "torch", torch_with(True, hip))
    monkeypatch.setattr(module, "_version", {"torch": "2.13", "transformers": "5"}.get)
    found = here()
    assert (found.device, found.name, found.vendor, found.compiler) == ("cuda", "a GPU", vendor, False)
    assert found.has("transformers")
    assert not found.has("xformers")
    assert here("cpu").device == "cpu"


def test_without_a_gpu_there_is_the_cpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", torch_with(False))
    monkeypatch.setattr(module, "_version", {"torch": "2.13"}.get)
    assert here().device == "cpu"
    with pytest.raises(UnsupportedError, match="sees no GPU"):
        here("cuda")
    with pytest.raises(UnsupportedError, match="does not know it"):
        here("tpu")


def test_without_torch_there_is_the_cpu(monkeypatch):
    monkeypatch.setattr(module, "_version", lambda name: None)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert here().versions == {}
    assert not here().compiler
