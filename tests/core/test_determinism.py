"""PyTorch's settings for equal bits: which are set, that they are restored, and what refuses an operation."""

from __future__ import annotations

import os

import pytest
import torch

from silotune.core.determinism import numerics
from silotune.errors import InputError

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def settings() -> dict[str, object]:
    """Everything that `numerics` may change."""
    return {
        "mode": torch.get_deterministic_debug_mode(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
        "deterministic": torch.backends.cudnn.deterministic,
        "benchmark": torch.backends.cudnn.benchmark,
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cublas": os.environ.get(VARIABLE),
        "flash": os.environ.get("FLASH_ATTENTION_DETERMINISTIC"),
    }


@pytest.fixture(autouse=True)
def _a_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


@pytest.mark.parametrize("tf32", [False, True])
def test_all_are_set_and_restored(tf32):
    before = settings()
    with numerics(deterministic=True, tf32=tf32):
        assert settings() == {
            "mode": 2,
            "filled": False,
            "deterministic": True,
            "benchmark": False,
            "tf32": (tf32, tf32),
            "cublas": ":4096:8",
            "flash": "1",
        }
    assert settings() == before


def test_they_are_restored_after_an_error():
    before = settings()
    with pytest.raises(KeyError), numerics(deterministic=True, tf32=False):
        raise KeyError
    assert settings() == before


def test_without_determinism_all_but_tf32_stay():
    before = settings()
    with numerics(deterministic=False, tf32=True):
        assert settings() == before | {"tf32": (True, True)}
    assert settings() == before


@pytest.mark.parametrize(("given", "during"), [(":16:8", ":16:8"), (":4096:2:16:8", ":4096:8")])
def test_a_deterministic_workspace_of_the_users_is_kept(monkeypatch, given, during):
    monkeypatch.setenv(VARIABLE, given)
    with numerics(deterministic=True, tf32=False):
        assert os.environ[VARIABLE] == during
    assert os.environ[VARIABLE] == given


@pytest.fixture
def by_newer_name():
    """TF32 chosen as `fp32_precision`."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    yield products
    products.fp32_precision = before


def test_a_program_that_uses_the_newer_names_of_tf32(by_newer_name):
    products = by_newer_name
    with pytest.raises(RuntimeError):  # PyTorch refuses to say it by the older name
        products.allow_tf32  # noqa: B018
    with numerics(deterministic=True, tf32=False):
        assert products.fp32_precision == "ieee"
    assert products.fp32_precision == "tf32"


def test_an_operation_without_deterministic_implementation_names_the_key():
    with (
        pytest.raises(InputError, match=r"^precision\.deterministic: put_ has .* allowed: precision\.deterministic=f"),
        numerics(deterministic=True, tf32=False),
    ):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    with numerics(deterministic=False, tf32=False):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), numerics(deterministic=True, tf32=False):
        torch.zeros(3) @ torch.zeros(4, 4)
