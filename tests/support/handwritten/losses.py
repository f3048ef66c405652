"""Losses, embeddings and linear layers by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.handwritten import B, D, Family, L, V

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "view": lambda logits, targets: F.cross_entropy(logits.reshape(-1, V), targets.view(-1)),
    "flatten": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100),
    "transposed": lambda logits, targets: F.cross_entropy(logits.transpose(1, 2), targets),
    "log_softmax": lambda logits, targets: F.nll_loss(F.log_softmax(logits, -1).view(-1, V), targets.view(-1)),
    "smoothed": lambda logits, targets: F.cross_entropy(logits.view(-1, V), targets.view(-1), label_smoothing=0.1),
    "ignore 0": lambda logits, targets: F.cross_entropy(
        logits.view(-1, V), targets.clamp(min=0).view(-1), ignore_index=0
    ),
    "sum": lambda logits, targets: F.cross_entropy(logits.view(-1, V), targets.view(-1), reduction="sum"),
    "none": lambda logits, targets: F.cross_entropy(logits.view(-1, V), targets.view(-1), reduction="none"),
    "shifted": lambda logits, targets: F.cross_entropy(
        logits[:, :-1].reshape(-1, V), targets[:, 1:].reshape(-1), ignore_index=-100
    ),
}
ROWS_OF_LOGITS = ("view", "flatten", "smoothed", "ignore 0", "sum", "none")
LOGITS: dict[str, Callable[..., Tensor]] = {
    "given": lambda logits, y, head: logits * 1.0,
    "linear": lambda logits, y, head: F.linear(y, head),
    "product": lambda logits, y, head: y @ head.t(),
    "float": lambda logits, y, head: F.linear(y, head).to(logits.dtype),
    "linear with bias": lambda logits, y, head: F.linear(y, head, head[:, 0]),
    "padded": lambda logits, y, head: F.linear(y, torch.cat((head, head[:3])))[..., :V],
    "padded, with bias": lambda logits, y, head: F.linear(
        y, torch.cat((head, head[:3])), torch.arange(V + 3).to(y.dtype)
    )[..., :V],
    "softcapped": lambda logits, y, head: 5.0 * torch.tanh(F.linear(y, head) / 5.0),
}
OBSERVED: dict[str, Callable[..., Any]] = {
    "nothing": lambda loss, logits: loss,
    "logits returned": lambda loss, logits: (loss, logits),
    "greedy": lambda loss, logits: (loss, logits.argmax(-1)),
    "logits changed no_grad": lambda loss, logits: (loss, logits.mul_(2.0)),
}


def spelled_loss(loss: str, logits: str, observed: str) -> Callable[..., Any]:
    def cross_entropy(logits: Tensor, y: Tensor, head: Tensor, targets: Tensor) -> Any:
        scores = made(logits, y, head)
        return OBSERVED[observed](LOSSES[loss](scores, targets), scores)

    made = LOGITS[logits]
    return cross_entropy


CROSS_ENTROPY = Family(
    "cross_entropy",
    {"loss": list(LOSSES), "logits": list(LOGITS), "observed": list(OBSERVED)},
    spelled_loss,
    lambda choices: frozenset(
        () if choices["loss"] not in ROWS_OF_LOGITS else ("cross_entropy",) if choices["logits"] == "given"
        else ("linear_cross_entropy",) if choices["observed"] == "nothing" else ()
    ),
)  # fmt: skip
trap = CROSS_ENTROPY.trap


@trap
def class_weights_given(logits, targets, class_weights):
    return F.cross_entropy(logits.view(-1, V), targets.view(-1), class_weights)


@trap
def probabilities_as_targets(logits, probabilities):
    return F.cross_entropy(logits.view(-1, V), probabilities)


@trap
def softmax_before(logits, targets):
    return F.cross_entropy(logits.softmax(-1).view(-1, V), targets.view(-1))


@trap
def log_softmax_over_rows(logits, targets):
    return F.nll_loss(F.log_softmax(logits, 1).view(-1, V), targets.view(-1))


@trap
def log_softmax_returned(logits, targets):
    logp = F.log_softmax(logits, -1)
    return F.nll_loss(logp.view(-1, V), targets.view(-1)), logp


@trap
def temperature_divides(logits, targets, temperature):
    return F.cross_entropy((logits / temperature).view(-1, V), targets.view(-1))


@trap
def softcapped(logits, targets):
    return F.cross_entropy((5.0 * torch.tanh(logits / 5.0)).view(-1, V), targets.view(-1))


@trap
def gathered(logits, targets):
    logp = F.log_softmax(logits, -1)
    return -logp.gather(-1, targets.clamp(min=0).unsqueeze(-1)).mean()


@trap
def weighted_rows(logits, targets, columns):
    loss = F.cross_entropy(logits.view(-1, V), targets.view(-1), reduction="none").view(-1, L)
    return (loss * columns[:, 0]).mean()


@trap
def of_the_last_row(logits, targets):
    return F.cross_entropy(logits[:, -1], targets[:, -1].clamp(min=0))


@trap
def linear_with_a_bias(y, head, logits, targets):
    return F.cross_entropy(F.linear(y, head, logits[0, 0]).view(-1, V), targets.view(-1))


@trap
def linear_of_a_scaled_row(y, head, targets):
    return F.cross_entropy(F.linear(y, head).view(-1, V) * 0.3, targets.view(-1))


@trap
def linear_is_used_twice(y, head, targets):
    logits = F.linear(y, head)
    return F.cross_entropy(logits.view(-1, V), targets.view(-1)) + logits.square().mean() * 1e-2


@trap
def linear_and_each_option(y, head, targets):
    options = ({"label_smoothing": 0.1}, {"ignore_index": 3}, {"reduction": "sum"}, {"reduction": "none"})
    rows = targets.view(-1).clamp(min=0)
    return tuple(F.cross_entropy(F.linear(y, head).view(-1, V), rows, **each) for each in options)


@trap
def linear_softcapped_by_another_number(y, head, targets):
    return F.cross_entropy(4.0 * torch.tanh(F.linear(y, head).view(-1, V) / 5.0), targets.view(-1))


@trap
def linear_softcapped_before_rows(y, head, targets):
    return F.cross_entropy((4.0 * torch.tanh(F.linear(y, head) / 5.0)).view(-1, V), targets.view(-1))


@trap
def linear_without_the_first_class(y, head, targets):
    return F.cross_entropy(F.linear(y, head)[..., 1:].reshape(-1, V - 1), targets.view(-1).clamp(max=V - 2))


@trap
def linear_whose_classes_are_flattened_apart(y, head, targets):
    return F.cross_entropy(F.linear(y, head)[..., :10].reshape(-1, 5), targets.repeat(1, 2).view(-1).clamp(max=4))


@trap
def linear_whose_logits_are_returned(y, head, targets):
    logits = F.linear(y, head)
    return F.cross_entropy(logits.view(-1, V), targets.view(-1)), logits


@trap
def linear_whose_rows_are_returned(y, head, targets):
    logits = F.linear(y, head).view(-1, V)
    return F.cross_entropy(logits, targets.view(-1)), logits


@trap
def linear_of_some_classes(y, head, targets):
    return F.cross_entropy(F.linear(y, head)[..., :5].reshape(-1, 5), targets.view(-1).clamp(max=4))


@trap
def linear_with_classes_in_axis_1(y, table, targets):
    return F.cross_entropy(F.linear(y, table[:D]), targets.clamp(max=7))


@trap
def linear_with_rows_joined_otherwise(y, table, targets):
    return F.cross_entropy(F.linear(y, table[:D]).transpose(0, 1).reshape(-1, D), targets.view(-1).clamp(max=7))


@trap
def linear_and_weights_of_classes(y, head, targets, class_weights):
    return F.cross_entropy(F.linear(y, head).view(-1, V), targets.view(-1), class_weights)


@trap
def linear_and_weights_with_a_gradient(y, head, targets, bias):
    weights = torch.cat((bias, bias[:3])).square()
    return F.cross_entropy(F.linear(y, head).view(-1, V), targets.view(-1), weights.detach())


@trap
def linear_and_probabilities(y, head, probabilities):
    return F.cross_entropy(F.linear(y, head).view(-1, V), probabilities)


@trap
def linear_written_before_the_loss(y, head, targets):
    logits = F.linear(y, head)
    logits *= 0.5
    return F.cross_entropy(logits.view(-1, V), targets.view(-1))


@trap
def linear_whose_weight_is_written_no_grad(y, head, targets):
    head = head.clone()
    logits = F.linear(y, head)
    head.zero_()
    return F.cross_entropy(logits.view(-1, V), targets.view(-1))


@trap
def tied_to_the_table(tokens, table, targets):
    return F.cross_entropy(F.linear(F.embedding(tokens, table), table).view(-1, V), targets.view(-1))


@trap
def head_is_detached(y, head, targets):
    return F.cross_entropy(F.linear(y, head.detach()).view(-1, V), targets.view(-1))


@trap
def distillation(logits, probabilities):
    return F.kl_div(F.log_softmax(logits.view(-1, V), -1), probabilities, reduction="batchmean")


SUMS: dict[str, Callable[..., Tensor]] = {
    "token": lambda e, positions, segments, table: e,
    "token + position": lambda e, positions, segments, table: e + positions,
    "position table": lambda e, positions, segments, table: e + F.embedding(torch.arange(L), positions),
    "position table unsqueezed": lambda e, positions, segments, table: (
        e + F.embedding(torch.arange(L).unsqueeze(0), positions)
    ),
    "sliced": lambda e, positions, segments, table: e + positions[:L].unsqueeze(0),
    "three": lambda e, positions, segments, table: e + positions + F.embedding(segments, table),
    "scaled": lambda e, positions, segments, table: e * D**0.5 + positions,
    "in place": lambda e, positions, segments, table: e.clone().add_(positions),
    "other order": lambda e, positions, segments, table: F.embedding(segments, table) + (positions + e),
}


def spelled_embedding(sum: str, then: str) -> Callable[..., Any]:
    def embedding(
        tokens: Tensor, table: Tensor, positions: Tensor, segments: Tensor, weight: Tensor, bias: Tensor
    ) -> Any:
        return THEN[then](SUMS[chosen](F.embedding(tokens, table), positions, segments, table), weight, bias)

    chosen = sum
    return embedding


THEN: dict[str, Callable[..., Any]] = {
    "nothing": lambda e, weight, bias: e,
    "dropout": lambda e, weight, bias: F.dropout(e, 0.1, training=False),
    "norm": lambda e, weight, bias: F.layer_norm(e, (D,), weight, bias),
    "norm and sum": lambda e, weight, bias: (F.layer_norm(e, (D,), weight, bias), e * 2),
    "changed": lambda e, weight, bias: e.mul(1.0).mul_(2.0),
}
EMBEDDING = Family("embedding", {"sum": list(SUMS), "then": list(THEN)}, spelled_embedding, lambda choices: frozenset())
trap = EMBEDDING.trap


@trap
def padding_index(tokens, table):
    return F.embedding(tokens, table, padding_idx=3)


@trap
def limited_norm_no_grad(tokens, table):
    return F.embedding(tokens, table * 1.0, max_norm=1.0)


@trap
def scaled_by_frequency(tokens, table):
    return F.embedding(tokens, table, scale_grad_by_freq=True)


@trap
def indexed(tokens, table):
    return table[tokens] + 1.0


@trap
def positions_of_other_rows(tokens, table, positions):
    return F.embedding(tokens, table) + F.embedding(torch.arange(L).flip(0), positions)


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda y, W, bias: F.linear(y, W, bias),
    "without bias": lambda y, W, bias: F.linear(y, W),
    "transposed": lambda y, W, bias: y @ W.t(),
    "addmm": lambda y, W, bias: torch.addmm(bias, y.view(-1, D), W).view(y.shape),
    "product": lambda y, W, bias: y @ W,
    "product and bias": lambda y, W, bias: y @ W + bias,
    "bias and matmul": lambda y, W, bias: bias + torch.matmul(y, W),
}
AFTER: dict[str, Callable[..., Any]] = {
    "nothing": lambda o: o,
    "gelu": lambda o: F.gelu(o, approximate="tanh"),
    "thirds": lambda o: o.view(B, L, 2, D // 2).transpose(1, 2).chunk(2, -1),
    "in place": lambda o: o.mul(1.0).add_(o),
}


def spelled_linear(product: str, after: str) -> Callable[..., Any]:
    def linear(y: Tensor, W: Tensor, bias: Tensor) -> Any:
        return AFTER[after](PRODUCTS[product](y, W, bias))

    return linear


LINEAR = Family(
    "linear", {"product": list(PRODUCTS), "after": list(AFTER)}, spelled_linear, lambda choices: frozenset({"linear"})
)
trap = LINEAR.trap


@trap
def bias_of_rows(y, W, columns):
    return y @ W + columns


@trap
def bias_of_a_matrix(y, W, W2):
    return torch.addmm(W2, y[0], W)


@trap
def bias_of_one_element(y, W, bias):
    return y @ W + bias[:1]


@trap
def bias_with_a_factor(y, W, bias):
    return torch.add(y @ W, bias, alpha=2.0)


@trap
def product_is_also_returned(y, W, bias):
    product = y @ W
    return product + bias, product


@trap
def product_of_two_batches(q, k):
    return q @ k


@trap
def weight_is_transposed_twice(y, W):
    return y @ W.t().t()


@trap
def weight_on_the_left(y, W):
    return W @ y


@trap
def weight_of_one_column(y, columns):
    return y @ columns


@trap
def linear_without_a_bias(y, W):
    return F.linear(y, W)


@trap
def linear_by_a_product(y, W, bias):
    return y @ W + bias


@trap
def linear_by_addmm(y, W, bias):
    return torch.addmm(bias, y.view(-1, D), W).view(y.shape)


@trap
def linear_by_addmm_with_factors(y, W, bias):
    return torch.addmm(bias, y.view(-1, D), W, beta=0.5, alpha=2.0)


@trap
def linear_plus_residual(y, W, bias, residual):
    return residual + F.linear(y, W, bias)


@trap
def linear_plus_residual_in_place(y, W, bias, residual):
    o = F.linear(y, W, bias)
    o += residual
    return o


@trap
def linear_of_a_computed_weight(y, W, W2):
    return F.linear(y, W @ W2 + W)


@trap
def linear_of_a_transposed_weight(y, W):
    return F.linear(y, W.t())


@trap
def linear_is_written_no_grad(y, W, bias):
    W = W.clone()
    o = F.linear(y, W, bias)
    W.zero_()
    return o + F.linear(y, W, bias)


@trap
def linear_with_a_vector(bias, W):
    return F.linear(bias, W)


@trap
def three_linears(y, W, W2, W3):
    return F.linear(y, W), F.linear(y, W2), F.linear(y, W3)


@trap
def linear_in_evaluation_dropout(y, W, bias, residual):
    return residual + F.dropout(F.linear(y, W, bias), 0.1, training=False)
