"""What is private in torch stands in one file, and does there what its name says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedstill.core import torch_internals

ROOT = Path(__file__).parents[2] / "src" / "fedstill"
ALLOWED = Path("core/torch_internals.py")


def dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The full name of an attribute that hangs on an imported module, else None."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, aliases)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def names_of_torch(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything of torch that a file imports or looks up."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                shown = alias.asname or alias.name.split(".")[0]
                aliases[shown] = alias.name if alias.asname else shown
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = full
                yield node.lineno, full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (full := dotted(node, aliases)):
            yield node.lineno, full


def private(source: str) -> set[tuple[int, str]]:
    return {
        (line, name)
        for line, name in names_of_torch(source)
        if name.split(".")[0] == "torch"
        and any(
            (word.startswith("_") and not word.startswith("__")) or word == "experimental"
            for word in name.split(".")
        )
    }


def test_private_names_of_torch_stand_in_one_file() -> None:
    offences = [
        f"{file.relative_to(ROOT)}:{line} uses {name}; give it a name in {ALLOWED}"
        for file in sorted(ROOT.rglob("*.py"))
        if file.relative_to(ROOT) != ALLOWED
        for line, name in sorted(private(file.read_text()))
    ]
    assert not offences, "\n" + "\n".join(offences)


def test_the_one_file_is_read_by_the_same_eyes() -> None:
    used = {name for _, name in private((ROOT / ALLOWED).read_text())}
    assert "torch._foreach_mul" in used
    assert "torch.utils._python_dispatch.TorchDispatchMode" in used
    assert "torch._C._functorch.get_unwrapped" in used


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_add([], [])",
        "from torch._utils import anything",
        "import torch as t\nt._C._functorch.maybe()",
        "import torch.nn.functional as F\nF._private",
        "from torch import nn\nnn._reduction",
        "from torch.fx.experimental import proxy_tensor",
    ],
)
def test_a_private_name_is_found_however_it_is_imported(source: str) -> None:
    assert private(source)


def test_public_and_dunder_names_are_left_alone() -> None:
    source = (
        "import torch\nfrom torch import Tensor\ntorch.__version__\ntorch.func.vmap\nself._torch"
    )
    assert private(source) == set()


def test_wrapped_tensors_are_told_and_unwrapped() -> None:
    plain = torch.arange(3.0)
    seen: list[tuple[bool, bool, bool]] = []

    def square(x: Tensor) -> Tensor:
        inside = torch_internals.in_gradient_under_vmap()
        seen.append((torch_internals.is_wrapped(x), torch_internals.in_transform(), inside))
        assert not torch_internals.is_wrapped(torch_internals.unwrapped(x))
        return x * x

    slopes = torch.func.vmap(torch.func.grad(square))(plain)
    square(plain)
    torch.func.vmap(square)(plain)
    assert slopes.tolist() == [0.0, 2.0, 4.0]
    assert seen == [(True, True, True), (False, False, False), (True, True, False)]
    assert torch_internals.unwrapped(plain) is plain


def test_a_torch_that_lacks_something_is_refused_by_name_at_the_start() -> None:
    class Other:
        """A torch of another day: nothing of `torch.func`, and no square roots of many."""

        __version__ = "9.0"

        def __getattr__(self, name: str) -> object:
            if name in ("_C", "_foreach_sqrt"):
                raise AttributeError(name)
            return getattr(torch, name)

    torch_internals.check()
    with pytest.raises(
        ImportError, match=r"torch 9\.0 has no torch\._C\..*, torch\._foreach_sqrt, "
    ):
        torch_internals.check(Other())


def test_every_private_name_of_the_file_is_looked_for_at_the_start() -> None:
    text = (ROOT / ALLOWED).read_text()
    used = set(re.findall(r"torch\.((?:_|ops\.|native|utils\.checkpoint\._)[\w.]+)\b", text))
    kinds = ("_foreach", "_C.", "native", "utils.")
    named = {name for name in used if name.startswith(kinds)}
    named |= {".".join(name.split(".")[:3]) for name in used if name.startswith("ops.")}
    assert named == set(torch_internals.NEEDED)


def test_many_tensors_at_once_are_as_one_by_one() -> None:
    left, right = [torch.tensor([1.0, -2.0]), torch.tensor(3.0)], [torch.ones(2), torch.tensor(4.0)]
    assert [t.tolist() for t in torch_internals.times_each(left, 2.0)] == [[2.0, -4.0], 6.0]
    assert [t.tolist() for t in torch_internals.sum_each(left, right)] == [[2.0, -1.0], 7.0]
    assert [t.item() for t in torch_internals.absolute_sum_each(left)] == [3.0, 3.0]
    assert torch_internals.flattened(left).tolist() == [1.0, -2.0, 3.0]
    torch_internals.copy_each(right, left)
    assert [t.tolist() for t in right] == [[1.0, -2.0], 3.0]


def test_few_large_tensors_go_one_by_one_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "LARGE", 2)
    left, right = [torch.tensor([1.0, -2.0])], [torch.tensor([1.0, 1.0])]
    assert torch_internals.few_and_large(left)
    assert not torch_internals.few_and_large([torch.tensor(3.0)])
    assert not torch_internals.few_and_large(5 * left)
    assert torch_internals.times_each(left, 2.0)[0].tolist() == [2.0, -4.0]
    assert torch_internals.sum_each(left, right)[0].tolist() == [2.0, -1.0]
    torch_internals.copy_each(right, left)
    assert right[0].tolist() == [1.0, -2.0]


def test_results_of_operations_are_shown_while_one_looks() -> None:
    shown: list[list[float]] = []
    with torch_internals.looking_at_results(lambda made: shown.extend(t.tolist() for t in made)):
        torch.ones(2) + 1
    torch.ones(2) + 2
    assert shown == [[1.0, 1.0], [2.0, 2.0]]


def test_operations_are_counted_as_torch_counts_them_without_its_compiler() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    images, kernels, matrix = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3), torch.ones(144, 5)

    def network() -> Tensor:
        maps = torch.relu(torch.nn.functional.conv2d(images, kernels))  # [2, 4, 6, 6]
        return maps.flatten(1) @ matrix

    # 2 images of 4 maps of 6 x 6 pixels from 27 values each, and 2 x 5 sums of 144 products.
    expected = 2 * (2 * 4 * 36 * 27) + 2 * (2 * 5 * 144)
    assert torch_internals.operations(network) == expected
    with FlopCounterMode(display=False) as counter:
        network()
    assert counter.get_total_flops() == expected


def test_a_traced_function_is_the_same_function() -> None:
    graph = torch_internals.traced(lambda x: [x * 2 + 1], [torch.zeros(2)])
    assert graph(torch.tensor([1.0, 2.0]))[0].tolist() == [3.0, 5.0]


def test_a_part_is_not_computed_again_by_the_name_of_newer_torch_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = torch.utils.checkpoint
    before, name = place.CheckpointFunction, "_checkpoint_without_reentrant_generator_impl"
    monkeypatch.setattr(place, name, "of torch 2.15", raising=False)
    with torch_internals.nothing_computed_again():
        assert getattr(place, name) is torch_internals._Kept.around
    assert getattr(place, name) == "of torch 2.15" and place.CheckpointFunction is before
