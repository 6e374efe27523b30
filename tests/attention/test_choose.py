"""choose and explain: the first back-end that can, never another than the one named, and always a reason."""

import sys
from types import ModuleType

import pytest
import torch

from vlmpack.attention import backends
from vlmpack.attention.backends import BACKENDS, AttentionCall, choose, explain
from vlmpack.errors import BackendError

ON_CPU = AttentionCall(device="cpu", dtype=torch.float32, head_dim=64, num_heads=8, num_kv_heads=4)
ON_GPU = AttentionCall(device="cuda", dtype=torch.bfloat16, head_dim=64, num_heads=8, num_kv_heads=4)


def changed(call, **fields):
    return AttentionCall(**{**vars(call), **fields})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (ON_CPU, "sdpa_segments"),
        (changed(ON_CPU, dtype=torch.bfloat16), "sdpa_segments"),
        (ON_GPU, "torch_varlen"),
        (changed(ON_GPU, dtype=torch.float32), "efficient"),
        (changed(ON_GPU, head_dim=320), "efficient"),
        (changed(ON_GPU, dtype=torch.float32, pattern=("window",)), "sdpa_segments"),
        (changed(ON_GPU, pattern=("window", "sinks")), "torch_varlen"),
        (changed(ON_GPU, head_dim=65), "sdpa_segments"),
    ],
)
def test_auto_takes_the_first_that_can(call, name):
    assert choose(call).name == name


def test_every_reason_is_told():
    reasons = explain(changed(ON_CPU, head_dim=65, num_kv_heads=3, dropout=0.1))
    assert list(reasons) == list(BACKENDS)
    assert reasons["sdpa_segments"] == reasons["eager_mask"] == []
    told = "; ".join(reasons["torch_varlen"])
    assert "runs on CUDA only, the tensors are on cpu" in told
    assert "float16 and bfloat16 only, the tensors are torch.float32" in told
    assert "multiple of 8 up to 256, it is 65" in told
    assert "8 query heads cannot share 3 key-value heads evenly" in told
    assert "set attention_dropout=0" in told
    assert any("flash-attn is not installed" in reason for reason in reasons["flash_attn"])


def test_a_named_back_end_is_never_exchanged_for_another():
    assert choose(ON_CPU, "eager_mask").name == "eager_mask"
    with pytest.raises(BackendError, match="'torch_varlen' cannot serve this call: it runs on CUDA only"):
        choose(ON_CPU, "torch_varlen")
    with pytest.raises(BackendError, match=r"no attention back-end 'sdpa'; choose one of \['auto', 'torch_varlen'"):
        choose(ON_CPU, "sdpa")


@pytest.fixture
def flash(monkeypatch):
    """A package of that name, found but without the kernel; what is looked up once is looked up again."""
    backends._missing.cache_clear()
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    yield sys.modules["flash_attn"]
    backends._missing.cache_clear()


@pytest.mark.parametrize("error", [ImportError("no symbol"), OSError("no library"), TypeError("no such argument")])
def test_whatever_its_import_raises_the_others_serve(error, flash):
    def broken(name):
        raise error

    flash.__getattr__ = broken
    (reason,) = explain(ON_GPU)["flash_attn"]
    assert reason.endswith(f"flash-attn has no kernel for this PyTorch ({type(error).__name__}: {error})")
    assert choose(ON_CPU).name == "sdpa_segments"


def test_softcap_with_dropout_is_left_to_pytorchs_own_attention(flash):
    """FlashAttention 2 refuses it: "Softcapping does not support dropout for now"."""
    flash.flash_attn_varlen_func = print
    assert explain(ON_GPU)["flash_attn"] == []
    capped = changed(ON_GPU, pattern=("softcap",))
    assert choose(capped).name == "flash_attn"
    dropped = changed(capped, dropout=0.1)
    assert choose(dropped).name == "sdpa_segments"
    with pytest.raises(BackendError, match=r"dropout is 0.1 and scores have a softcap.*set attention_dropout=0"):
        choose(dropped, "flash_attn")
    assert choose(changed(ON_GPU, dropout=0.1)).name == "flash_attn"


def test_a_gpu_before_ampere_is_left_to_pytorchs_own_attention(monkeypatch):
    monkeypatch.setattr(backends, "_capability", lambda: (7, 5))
    assert choose(ON_GPU).name == "sdpa_segments"
    assert explain(ON_GPU)["torch_varlen"] == ["it needs compute capability 8.0 (Ampere), this GPU has 7.5"]


def test_the_kernel_that_pytorch_was_told_to_take_is_named(monkeypatch):
    """FlashAttention 3 or 4, for windows and sinks too."""
    windows_and_sinks = changed(ON_GPU, pattern=("window", "sinks"))
    assert backends.kernel_of(windows_and_sinks, choose(windows_and_sinks).name) == "FlashAttention 2"
    monkeypatch.setattr("torch.nn.attention._registry._FLASH_ATTENTION_ACTIVE", ("FA3", None))
    assert backends.kernel_of(windows_and_sinks, choose(windows_and_sinks).name) == "FlashAttention 3"


def test_head_dimensions_that_flash_attention_4_lacks_on_blackwell_go_to_another_kernel(monkeypatch):
    """192, as in latent attention: values are padded to it (flash_attn/cute/interface.py, `_validate_head_dims`)."""
    monkeypatch.setattr("torch.nn.attention._registry._FLASH_ATTENTION_ACTIVE", ("FA4", None))
    taken = {}
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(backends, "_capability", lambda capability=capability: capability)
        taken[capability] = [choose(changed(ON_GPU, head_dim=dim)).name for dim in (64, 128, 192, 256)]
    assert taken == {(9, 0): ["torch_varlen"] * 4, (10, 0): [*["torch_varlen"] * 2, "efficient", "torch_varlen"]}
