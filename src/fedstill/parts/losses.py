"""Losses as functions, reductions written out; nothing is held."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import gpu
from fedstill.core.data import Batch
from fedstill.core.precision import half_asked_for
from fedstill.core.records import Weights
from fedstill.core.torch_internals import in_gradient_under_vmap, is_stacked, unwrapped

Regulariser = Literal["contrastive", "mmd", "none"]

KERNELS = "kernels.loss_terms"  # of losses that are many small operations


def supervised_contrastive(
    features: Tensor,  # [row, feature]
    labels: Tensor,  # [row]
    *,
    temperature: float = 0.07,
) -> Tensor:
    """Khosla et al. 2020, with normalised features; the mean over all rows.

    A row without a partner of its class contributes zero and still counts in the mean. The public
    code also multiplies by temperature / 0.07, which is 1 at its default; here the caller weighs.
    """
    if len(labels) < 2:  # nobody to compare with, and the log of an empty sum
        return 0 * features.sum()
    unfolded = partial(_contrast, labels=labels, temperature=temperature)
    kernels = _kernels(features)
    if kernels is None or len(labels) > kernels.ROWS:
        return unfolded(features)
    fused: Tensor = kernels.contrasted(features, labels, temperature, unfolded)
    return fused


def _kernels(*tensors: Tensor) -> Any:
    """Kernels that may be handed these, or None."""
    return gpu.kernels(KERNELS, *tensors) if gpu.plain_on_gpu(*tensors) else None


def _kernels_of_stacks(logits: Tensor, labels: Tensor) -> Any:
    """Kernels for what a stack in half precision computes beside its networks, or None."""
    if not (half_asked_for() and in_gradient_under_vmap()):
        return None
    if not (is_stacked(logits) and is_stacked(labels)):
        return None
    plain = unwrapped(logits)
    single = plain.dtype == torch.float32 and labels.dtype == torch.long and logits.dim() == 2
    fit = plain.is_cuda and single and not plain.requires_grad
    return gpu.kernels(KERNELS, plain) if fit else None


def _contrast(features: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """As above, by torch's operations."""
    unit = F.normalize(features, dim=1)
    alike = unit @ unit.T / temperature  # [row, row]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    alike = alike - alike.detach().amax(1, keepdim=True)
    others = alike.masked_fill(itself, float("-inf"))
    log_share = alike - torch.logsumexp(others, 1, keepdim=True)
    partners = (labels.unsqueeze(0) == labels.unsqueeze(1)) & ~itself
    count = partners.sum(1)
    per_row = -(log_share * partners).sum(1) / count.clamp(min=1)
    return per_row.mean()


def mmd(left: Tensor, right: Tensor, *, kernels: int = 5) -> Tensor:
    """Squared maximum mean discrepancy with a family of RBF kernels.

    The middle bandwidth is the mean squared distance over all pairs of the joined rows; the
    others are it times powers of two.
    """
    rows = torch.cat([left, right])  # [row, feature]
    squared = (rows.unsqueeze(0) - rows.unsqueeze(1)).square().sum(2)
    pairs = max(len(rows) * (len(rows) - 1), 1)
    base = squared.detach().sum() / pairs / 2 ** (kernels // 2)
    widths = base.clamp(min=1e-12) * 2.0 ** torch.arange(kernels, device=rows.device)
    kernel = torch.exp(-squared.unsqueeze(0) / widths.reshape(-1, 1, 1)).sum(0)
    n = len(left)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


def drawn_towards(rows: Batch, others: Batch, how: Regulariser, temperature: float) -> Tensor:
    """What draws features of rows to those of others: alike by class, or as a whole (MMD)."""
    if how == "mmd":
        return mmd(rows.x, others.x)
    features, labels = torch.cat([rows.x, others.x]), torch.cat([rows.y, others.y])
    return supervised_contrastive(features, labels, temperature=temperature)


def task_loss(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """The mean over rows of the cross-entropy, each times the weight of its class, if any."""
    if class_weights is None:
        kernels = _kernels_of_stacks(logits, labels)
        if kernels is None or not 0 < logits.numel() <= kernels.ENTRIES:
            return F.cross_entropy(logits, labels)
        fused: Tensor = kernels.crossed(logits, labels)
        return fused
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (class_weights[labels] * losses).mean()  # [row] -> scalar


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-mean over rows and classes of target · log softmax(logits), as DynaFed's code has it."""
    return -(targets * F.log_softmax(logits, 1)).mean()


def diversity(
    noise: Tensor, outputs: Tensor, *, apart_by: Literal["absolute", "square"] = "absolute"
) -> Tensor:
    """exp(-mean over pairs of d(noise) · d(outputs)): 1 where all outputs are equal.

    d is the mean squared difference of two rows of noise; of two outputs the mean absolute one
    (FedGen, FedFTG) or squared one (DFRD). Norms, as papers print them, would make the exponent
    vanish for images. The mean is over all ordered pairs, a row with itself included.
    """
    rows = outputs.flatten(1)
    if apart_by == "square":
        lengths = rows.square().sum(1)
        squares = lengths.unsqueeze(0) + lengths.unsqueeze(1) - 2 * rows @ rows.T
        apart = squares.clamp(min=0) / rows.shape[1]  # [row, row]
    else:
        apart = torch.cdist(rows, rows, p=1) / rows.shape[1]
    drawn = (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(2)
    return torch.exp(-(drawn * apart).mean())


def class_square_error(outputs: Tensor, labels: Tensor, targets: Tensor, known: Tensor) -> Tensor:
    """Mean over rows and entries of (output - its class's target)²; unknown classes add zero."""
    gap = (outputs - targets[labels]) * known[labels].unsqueeze(1)  # [row, entry]
    return gap.square().mean()


def model_contrast(own: Tensor, near: Tensor, far: Tensor, *, temperature: float) -> Tensor:
    """MOON: -log of near's share in exp(cos(own, ·) / temperature), mean over rows."""
    towards = F.cosine_similarity(own, near, dim=1)
    away = F.cosine_similarity(own, far, dim=1)
    return F.softplus((away - towards) / temperature).mean()


def hinton(
    student: Tensor,  # [row, class], logits
    teacher: Tensor,  # [row, class], logits
    labels: Tensor,  # [row]
    *,
    temperature: float,
    soft_share: float,
    weight: Tensor | None = None,  # [row]; one where not given
    reduction: Literal["rows", "elements"] = "rows",
) -> Tensor:
    """(1 - share) · CE + share · T² · KL(softmax(teacher / T) || softmax(student / T)).

    The mean over rows of each row's weighted value. `elements` divides the KL by the number of
    classes too, as the framework's default does: with ten classes it counts a tenth.
    """
    teacher = teacher.detach()

    def unfolded(student: Tensor) -> Tensor:
        soft = row_divergences(student, teacher, temperature=temperature)
        if reduction == "elements":
            soft = soft / student.shape[1]
        hard = F.cross_entropy(student, labels, reduction="none")
        per_row = (1 - soft_share) * hard + soft_share * temperature**2 * soft
        return (per_row if weight is None else weight * per_row).mean()

    weighed = weight is not None and weight.requires_grad  # of that kernels have no gradient
    kernels = _kernels(student, teacher, *([] if weight is None else [weight]))
    if kernels is None or weighed or not 0 < student.numel() <= kernels.ENTRIES:
        return unfolded(student)
    soft = soft_share * temperature**2
    soft = soft / student.shape[1] if reduction == "elements" else soft
    shares = (1 - soft_share, soft, temperature)
    fused: Tensor = kernels.distilled(student, teacher, labels, weight, shares, unfolded)
    return fused


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(softmax(teacher) ‖ softmax(student)) of logits: summed over classes, mean over rows."""
    return row_divergences(student, teacher).mean()


def row_divergences(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """[..., row], KL(softmax(teacher / T) ‖ softmax(student / T)), summed over classes; no T²."""
    log_p = F.log_softmax(teacher / temperature, -1)
    log_q = F.log_softmax(student / temperature, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)  # [..., row, class] -> [..., row]


Selection = Literal["wrong_student", "disagreement", "one_right", "all"]


def selected(student: Tensor, teacher: Tensor, labels: Tensor, selection: Selection) -> Tensor:
    """[row], one for images worth moving a student with, else zero; logits are [row, class].

    `wrong_student`: the teacher says the label and the student does not (DFRD ◇);
    `disagreement`: they say different things (DENSE ▽); `one_right`: one of them says the label and
    the other does not, which DFRD's released code takes for that; `all` (FedFTG △).
    """
    theirs, own = teacher.argmax(1), student.argmax(1)
    if selection == "all":
        kept = torch.ones_like(theirs, dtype=torch.bool)
    elif selection == "disagreement":
        kept = theirs != own
    elif selection == "one_right":
        kept = (theirs == labels) != (own == labels)
    else:
        kept = (own != labels) & (theirs == labels)
    return kept.to(student)


def transferability(
    student: Tensor,  # [row, class], logits
    teacher: Tensor,  # [row, class], logits
    labels: Tensor,  # [row]
    *,
    selection: Selection,
    temperature: float,
    detached: bool = False,
) -> Tensor:
    """-(1 / rows) · Σ over selected rows of KL(teacher ‖ student), through both (DFRD, eq. 3).

    The sum is divided by all rows, so that few selected ones count little, and none give zero.
    `detached` is the form of later code by DFRD's first author: KL(student ‖ teacher) with the
    student's part held fixed, mean over the selected rows.
    """
    mask = selected(student, teacher, labels, selection)
    if detached:
        gaps = row_divergences(teacher, student.detach(), temperature=temperature)
        return -(mask * gaps).sum() / mask.sum().clamp(min=1)
    return -(mask * row_divergences(student, teacher, temperature=temperature)).mean()


def statistics_gap(seen: Weights, weights: Weights) -> Tensor:
    """Σ over batch norms of ‖mean - running mean‖ + ‖variance - running variance‖ (DENSE).

    `seen` holds the statistics of a batch under the names of the layers' own.
    """
    gaps = [torch.linalg.vector_norm(value - weights[name]) for name, value in seen.items()]
    if not gaps:
        return next(iter(weights.values())).new_zeros(())
    return torch.stack(gaps).sum()


def standardised(logits: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Each column less its mean, by its deviation over the rows; a constant column gives zeros."""
    centred = logits - logits.mean(0)
    return centred / (centred.square().mean(0) + eps).sqrt()


def cross_correlation(student: Tensor, teacher: Tensor, *, off_diagonal: float) -> Tensor:
    """Huang et al. 2022 (FCCL): Σ_u (1 - M_uu)² + λ Σ_{u≠v} (1 + M_uv)².

    M is the correlation between classes of the student's and of the teacher's logits. Unlike in
    Barlow Twins, different classes are to be opposed (-1), not independent (0).
    """
    matrix = standardised(student).T @ standardised(teacher) / len(student)  # [class, class]
    same = torch.eye(len(matrix), device=matrix.device)
    return (same * (1 - matrix) ** 2 + off_diagonal * (1 - same) * (1 + matrix) ** 2).sum()
