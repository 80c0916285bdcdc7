"""Networks as users write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GroupNet(nn.Module):
    """Group norm, a ReLU that works in place, a head called fc."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.act = nn.ReLU(inplace=True)
        self.fc = nn.Linear(width * 16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        return self.fc(F.avg_pool2d(x, 2).flatten(1))  # type: ignore[no-any-return]


class BatchNet(nn.Module):
    """Batch norm and dropout, no bias before the norm and none in the head."""

    def __init__(self, drop: float = 0.3) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(drop),
        )  # fmt: skip
        self.out = nn.Linear(64, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))  # type: ignore[no-any-return]


class VectorNet(nn.Module):
    """For four numbers: batch norm that cannot see one example alone, dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(F.dropout(x, 0.2, self.training))  # type: ignore[no-any-return]


class Twin(nn.Module):
    """The built-in ConvNet with two blocks of four channels for 1x8x8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(1, 4, 3, padding=1)
        self.norm0 = nn.GroupNorm(4, 4)
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, 4)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.norm0(self.conv0(x))), 2)
        x = F.avg_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


class Attentive(nn.Module):
    """Rows of an 8x8 image look at each other; torch's kernels for that know no stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Linear(8, 24)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.seen(x).chunk(3, dim=-1)  # each [example, channel, row, column]
        rows = F.scaled_dot_product_attention(query, key, value)
        return self.head(rows.flatten(1))  # type: ignore[no-any-return]
