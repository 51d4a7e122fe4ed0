from __future__ import annotations

import pytest
import torch

from turnwise.models import logprobs as module
from turnwise.models.logprobs import RaggedIds, logprobs_of, token_logprobs


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, ...]:
    log_p = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def inputs(
    num_rows: int, vocab_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, 6, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(vocab_size, 6, dtype=dtype, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, vocab_size, (num_rows,), generator=generator)


@pytest.mark.parametrize("chunk_elements", [1, 40, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_plain_log_softmax(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int, temperature: float
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, targets = inputs(7, 11, torch.float64)
    coefficients = torch.linspace(-1, 2, 7, dtype=torch.float64)
    gradients = []
    for function in (plain, lambda h, w, t, T: token_logprobs(h, w, t, T, with_entropy=True)[::2]):
        logprobs, entropy = function(hidden, weight, targets, temperature)
        total = (coefficients * logprobs).sum() + (coefficients.flip(0) * entropy**2).sum()
        gradients.append((logprobs, entropy, *torch.autograd.grad(total, (hidden, weight))))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-12)


def test_no_entropy_unless_asked_and_nothing_for_no_rows() -> None:
    hidden, weight, targets = inputs(0, 5, torch.float32)
    logprobs, kept, entropy = token_logprobs(hidden, weight, targets)
    assert entropy is None and kept is None and logprobs.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is not None and not weight.grad.any()


def test_large_logits_stay_finite() -> None:
    hidden = torch.full((1, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    logprobs, _, entropy = token_logprobs(hidden, weight, torch.tensor([1]), with_entropy=True)
    assert logprobs.item() == -2e4 and entropy is not None and entropy.item() == 0.0
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_bf16_products_are_reduced_in_fp32() -> None:
    hidden, weight, targets = inputs(64, 300, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs = token_logprobs(hidden, weight, targets).full
    exact, _ = plain(hidden, weight, targets, 1.0)
    assert logprobs.dtype == torch.float32
    assert 0 < (logprobs - exact).abs().max() < 0.1
    logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32


def some_kept_ids(targets: torch.Tensor, vocab_size: int) -> tuple[RaggedIds, torch.Tensor]:
    """The target and some others of each row, nothing of every third, and the same as a mask [N, V]; those
    without are full."""
    mask = torch.rand(len(targets), vocab_size, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[torch.arange(len(targets)), targets] = True
    mask[::3] = False
    kept_ids = RaggedIds(mask.nonzero()[:, 1], mask.sum(1))
    mask[::3] = True
    return kept_ids, mask


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, 40, 10**6])
def test_log_probs_over_kept_ids_and_their_gradients_equal_a_masked_softmax(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int, per_token: bool
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, targets = inputs(7, 11, torch.float64)
    kept_ids, mask = some_kept_ids(targets, 11)
    of_each = torch.linspace(0.5, 1.5, 7, dtype=torch.float64)
    temperature, of_rows = (of_each, of_each[:, None]) if per_token else (0.7, 0.7)

    def masked() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        full, entropy = plain(hidden, weight, targets, of_rows)
        z = (hidden @ weight.T / of_rows).masked_fill(~mask, -torch.inf)
        return full, z.gather(-1, targets[:, None]).squeeze(-1) - z.logsumexp(-1), entropy

    def ours() -> tuple[torch.Tensor | None, ...]:
        return token_logprobs(hidden, weight, targets, temperature, with_entropy=True, kept_ids=kept_ids)

    results = []
    for function in (masked, ours):
        outputs = function()
        factors = torch.linspace(-1, 2, 21, dtype=torch.float64).split(7)
        total = sum((factor * output).sum() for factor, output in zip(factors, outputs, strict=True))
        results.append((*outputs, *torch.autograd.grad(total, (hidden, weight))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)
    logits = (hidden @ weight.T).detach().requires_grad_()
    of_logits = logprobs_of(logits, targets, of_each.float() if per_token else 0.7, kept_ids=kept_ids)
    torch.testing.assert_close(of_logits.truncated, results[0][1].float(), rtol=1e-5, atol=1e-6)
    of_logits.truncated.sum().backward()
    assert torch.isfinite(logits.grad).all()
