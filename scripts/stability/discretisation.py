"""The discretisation error of a trained model: what an Euler step would have done with the same tokens.

One forward pass records the keys, values and gates of every layer and head of a delta-rule model. Three states are
computed from them, with lam = |k|^2 of the keys as the rule uses them:

    exact   S_t = (I - a k k^T) S_{t-1} + a k v^T,  a = (1 - exp(-beta lam)) / lam       the flow over a step of beta
    euler   S_t = (I - beta k k^T) S_{t-1} + beta k v^T                                  its explicit Euler step
    unit    euler with k / |k|, which is DeltaNet                                        (equal to euler in a DeltaNet)

The error of Euler is |S_euler - S_exact| / |S_exact| (Frobenius) after the last token. It grows with beta lam: the step
overshoots where beta lam > 1, and flips and grows the error where beta lam > 2. For gated rules exact is Gated EFLA's
(e, w, g - 1) and Euler is Gated DeltaNet's (beta, beta, log g) of the same tokens.

Survival of a corruption: the token embeddings of the first half are disturbed by Gaussian noise of a stated size, and
the relative change of each layer's state is read at the end of the first half and after the clean second half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import efla_kernels
import torch
from torch import Tensor

from efla_lm.errors import UserError
from efla_lm.models.rules import RULES

EDGES = tuple(10 ** (0.1 * n) for n in range(-50, 21))  # of beta lam's histogram: ten bins a decade, 1e-5 to 100


@dataclass
class Recorded:
    """The inputs of one layer's rule."""

    k: Tensor  # [B, T, H, K], as the rule uses it (normalised in the DeltaNets)
    v: Tensor
    beta: Tensor  # [B, T, H]
    log_g: Tensor | None


def record(model: Any, ids: Tensor) -> list[Recorded]:
    """Run the model on ids [B, T] and record the inputs of each layer's rule.

    Raises:
        UserError: the model has no delta rule.
    """
    mixer = getattr(model.config, "mixer", None)
    delta = [name for name, rule in RULES.items() if rule.delta]
    if mixer not in delta:
        raise UserError(f"the discretisation error is defined for {', '.join(delta)}; the model is {mixer}")
    found: list[Recorded] = []
    layers = [block.mixer for block in model.model.layers]
    rules = [layer.rule for layer in layers]

    def recording(rule: Any) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, **options: Any) -> Any:
            unit = RULES[mixer].unit_keys
            key = efla_kernels.unit_norm(k) if unit else k.float()
            beta = efla_kernels.beta_gate(gates[0])
            found.append(Recorded(key, v.float(), beta, gates[1].float() if len(gates) > 1 else None))
            return rule(q, k, v, *gates, **options)

        return run

    try:
        for layer, rule in zip(layers, rules):
            layer.rule = recording(rule)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for layer, rule in zip(layers, rules):
            layer.rule = rule
    return found


def final_state(k: Tensor, v: Tensor, erase: Tensor, write: Tensor, log_decay: Tensor | None) -> Tensor:
    """[B, H, K, V] in fp64: an unstable Euler step grows beyond fp32, and that is the finding."""
    wide = [None if x is None else x.double() for x in (k, v, erase, write, log_decay)]
    k, v, erase, write, log_decay = wide  # type: ignore[assignment]
    _, state = efla_kernels.delta_rule(k, k, v, erase, write, log_decay, output_final_state=True, backend="torch")
    assert state is not None
    return state


def euler_error(layer: Recorded) -> dict[str, Any]:
    """Per head: beta lam's histogram and shares, and the median and worst relative error of the Euler states."""
    lam = efla_kernels.squared_norm(layer.k)
    step = layer.beta * lam
    if layer.log_g is None:
        a = efla_kernels.erase_write_efla(layer.beta, lam)
        reference = final_state(layer.k, layer.v, a, a, None)
    else:
        reference = final_state(layer.k, layer.v, *efla_kernels.gated_coefficients(layer.beta, lam, layer.log_g))
    unit_key = efla_kernels.unit_norm(layer.k)
    states = {
        "euler": final_state(layer.k, layer.v, layer.beta, layer.beta, layer.log_g),
        "unit": final_state(unit_key, layer.v, layer.beta, layer.beta, layer.log_g),
    }
    norm = reference.flatten(2).norm(dim=-1).clamp(min=1e-300)
    errors = {name: (state - reference).flatten(2).norm(dim=-1) / norm for name, state in states.items()}
    heads = step.shape[2]
    rows = []
    for head in range(heads):
        values = step[..., head].flatten()
        inside = values.double().cpu().clamp(EDGES[0], EDGES[-1])  # the outer bins hold what lies beyond them
        counts = torch.histogram(inside, bins=torch.tensor(EDGES, dtype=torch.float64)).hist
        rows.append(
            {
                "beta_lam_mean": values.mean().item(),
                "beta_lam_max": values.max().item(),
                "share_beyond_1": (values > 1).float().mean().item(),
                "share_beyond_2": (values > 2).float().mean().item(),
                "histogram": counts.long().tolist(),
                **{f"{n}_error_median": finite(e[:, head].median()) for n, e in errors.items()},
                **{f"{n}_error_worst": finite(e[:, head].max()) for n, e in errors.items()},
            }
        )
    return {"heads": rows}


def finite(value: Tensor) -> float | None:
    """A number for JSON; None where the state has left fp64's range."""
    number = value.item()
    return number if abs(number) < float("inf") else None


@torch.no_grad()
def survival(model: Any, ids: Tensor, sizes: tuple[float, ...], seed: int) -> list[dict[str, Any]]:
    """How much of a disturbance of the first half of the tokens is in the state, at the half and at the end.

    Noise of standard deviation size x that of the embeddings is added to the first half. Per layer and size: the
    relative change of S, median over sequences and heads.
    """
    half = ids.shape[1] // 2
    embeddings = model.get_input_embeddings()(ids)
    generator = torch.Generator(device=ids.device).manual_seed(seed)
    noise = torch.randn(embeddings[:, :half].shape, generator=generator, device=ids.device) * embeddings.std()
    clean = _states(model, embeddings, half)
    rows = []
    for size in sizes:
        disturbed = embeddings.clone()
        disturbed[:, :half] += size * noise
        changed = _states(model, disturbed, half)
        for layer, (before, after) in enumerate(zip(clean, changed)):
            at_half, at_end = (relative_change(b, a) for b, a in zip(before, after))
            rows.append({"layer": layer, "size": size, "at_half": at_half, "at_end": at_end})
    return rows


def _states(model: Any, embeddings: Tensor, half: int) -> list[tuple[Tensor, Tensor]]:
    """(state after the first half, state after all) of each layer."""
    first = model(inputs_embeds=embeddings[:, :half], use_cache=True)
    at_half = [layer.state.clone() for layer in first.cache.layers]
    second = model(inputs_embeds=embeddings[:, half:], cache=first.cache, use_cache=True)
    return [(a, layer.state.clone()) for a, layer in zip(at_half, second.cache.layers)]


def relative_change(before: Tensor, after: Tensor) -> float:
    """Median over sequences and heads of |after - before| / |before|."""
    change = (after - before).flatten(2).norm(dim=-1) / before.flatten(2).norm(dim=-1).clamp(min=1e-30)
    return change.median().item()
