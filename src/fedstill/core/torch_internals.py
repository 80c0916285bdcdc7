"""What fedstill uses of torch beyond its documented interface, each under a name of our own.

A new version of torch may change any of these without notice. So they stand in this file alone,
and whoever raises the version in `pyproject.toml` reads it from top to bottom. Five kinds: how
`torch.func` wraps tensors, one operation on many tensors at once, the gradients of single
operations, parts of a network that are computed again, and looking at operations while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

NEEDED = (
    *("_C._functorch.is_functorch_wrapped_tensor", "_C._functorch.is_batchedtensor"),
    *("_C._functorch.get_unwrapped", "_C._functorch.peek_interpreter_stack"),
    *("_C._functorch.get_interpreter_stack", "_C._functorch.TransformType"),
    "_C._DisableTorchDispatch",
    *("_foreach_mul", "_foreach_add", "_foreach_div", "_foreach_sqrt", "_foreach_norm"),
    *("_foreach_copy_", "_foreach_add_"),
    *("utils.checkpoint._checkpoint_without_reentrant_generator",),
    *("native_group_norm", "ops.aten.native_group_norm_backward", "ops.aten.threshold_backward"),
)


def check(of: Any = torch) -> None:
    """Refuse a torch without something that this file uses, before anything is computed."""
    lacking = []
    for name in NEEDED:
        try:
            attrgetter(name)(of)
        except AttributeError:
            lacking.append(f"torch.{name}")
    if lacking:
        raise ImportError(
            f"torch {of.__version__} has no {', '.join(lacking)}, which fedstill uses; it was "
            "tried with torch 2.9 to 2.15"
        )


check()

# Whether `torch.func` holds this tensor: it stands for many, or a gradient by it is being taken.
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def is_stacked(tensor: Tensor) -> bool:
    """Whether a tensor stands for many under some `vmap`."""
    while is_wrapped(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def unwrapped(tensor: Tensor) -> Tensor:
    """The ordinary tensor in a tensor that `torch.func` has wrapped, however often."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def writes_into(tensor: Tensor) -> int:
    """How often a tensor was written into in place."""
    return tensor._version


def whole_of(tensor: Tensor) -> Tensor:
    """The tensor of which this one is a view; itself where it is none."""
    base: Tensor | None = tensor._base
    return tensor if base is None else base


def fills_its_memory(tensor: Tensor) -> bool:
    """Whether there is no number in a tensor's memory that it does not show."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def in_transform() -> bool:
    """Whether the caller runs inside any `torch.func` transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_gradient_under_vmap() -> bool:
    """Whether the caller runs inside exactly one `vmap`, and in it exactly one gradient."""
    kinds = torch._C._functorch.TransformType
    levels = [level.key() for level in torch._C._functorch.get_interpreter_stack() or []]
    return levels == [kinds.Vmap, kinds.Grad]


def in_gradient_of_examples() -> bool:
    """Whether the caller runs inside one gradient, and that directly inside a `vmap`."""
    kinds = torch._C._functorch.TransformType
    levels = [level.key() for level in torch._C._functorch.get_interpreter_stack() or []]
    return levels[-2:] == [kinds.Vmap, kinds.Grad] and levels.count(kinds.Grad) == 1


FEW, LARGE = 4, 2**16  # tensors; numbers of one


def few_and_large(tensors: Sequence[Tensor]) -> bool:
    """Whether an operation of each is better than one for all.

    That shares its work out in pieces of `LARGE` numbers, which of a few tensors are too few to
    keep a GPU busy.
    """
    return len(tensors) <= FEW and all(tensor.numel() >= LARGE for tensor in tensors)


def times_each(tensors: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Each tensor times a factor, in one operation for all; not for wrapped tensors."""
    if few_and_large(tensors):
        return [tensor * factor for tensor in tensors]
    return list(torch._foreach_mul(tensors, factor))


def sum_each(left: list[Tensor], right: list[Tensor], factor: float = 1) -> list[Tensor]:
    """Each tensor plus a factor times its counterpart, in one operation; not for wrapped ones."""
    if few_and_large(left):
        return [torch.add(a, b, alpha=factor) for a, b in zip(left, right, strict=True)]
    return list(torch._foreach_add(left, right, alpha=factor))


def add_each(left: list[Tensor], right: list[Tensor], factor: float) -> None:
    """As `sum_each`, written where the first tensors are."""
    if few_and_large(left):
        for a, b in zip(left, right, strict=True):
            a.add_(b, alpha=factor)
        return
    torch._foreach_add_(left, right, alpha=factor)


def product_each(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Each tensor times its counterpart, in one operation for all; not for wrapped tensors."""
    return list(torch._foreach_mul(left, right))


def quotient_each(tensors: list[Tensor], divisor: Tensor | list[Tensor]) -> list[Tensor]:
    """Each tensor over a number or its counterpart, in one operation; not for wrapped tensors."""
    return list(torch._foreach_div(tensors, divisor))


def root_each(tensors: list[Tensor]) -> list[Tensor]:
    """The square root of each tensor, in one operation for all; not for wrapped tensors."""
    return list(torch._foreach_sqrt(tensors))


def raised_each(tensors: list[Tensor], by: float) -> list[Tensor]:
    """Each tensor plus a number, in one operation for all; not for wrapped tensors."""
    return list(torch._foreach_add(tensors, by))


def absolute_sum_each(tensors: list[Tensor]) -> list[Tensor]:
    """The sum of absolute values of each tensor, in one operation for all."""
    return list(torch._foreach_norm(tensors, 1))


def copy_each(places: list[Tensor], values: list[Tensor]) -> None:
    """Write each value into its place, in one operation for all."""
    if few_and_large(places):
        for place, value in zip(places, values, strict=True):
            place.copy_(value)
        return
    torch._foreach_copy_(places, values)


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The entries of many tensors of one type in one tensor, in order."""
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def normed_by_channel(
    maps: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Maps after an instance norm, and each map's mean and inverse deviation."""
    images, channels, height, width = maps.shape
    normed, mean, factor = torch.native_group_norm(
        maps, scale, shift, images, channels, height * width, channels, eps
    )
    return normed, mean, factor


def gradients_of_norm(
    grad: Tensor,
    maps: Tensor,
    mean: Tensor,
    factor: Tensor,
    scale: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of maps, scale and shift of `normed_by_channel`; None where none is wanted."""
    images, channels, height, width = maps.shape
    found: tuple[Tensor | None, ...] = torch.ops.aten.native_group_norm_backward(
        grad, maps, mean, factor, scale, images, channels, height * width, channels, list(wanted)
    )
    return found


def gradient_of_relu_(grad: Tensor, activated: Tensor) -> Tensor:
    """What of a gradient passes a ReLU with these results, written over it."""
    torch.ops.aten.threshold_backward.grad_input(grad, activated, 0, grad_input=grad)
    return grad


def traced(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Any:
    """The operations of a function written down as a graph, gradients in it included."""
    # Imported late: it takes a moment, and only `engine.compile` asks for it.
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*inputs)


class _Kept:
    """A part of a network whose maps are kept, in place of torch's, computed again for gradients.

    `apply` is called in place of the reentrant way, and `around` runs around a part in the other.
    """

    @staticmethod
    def apply(part: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return part(*args)

    @staticmethod
    def around(*args: Any, **options: Any) -> Iterator[None]:
        yield


@contextmanager
def nothing_computed_again() -> Iterator[None]:
    """Inside, `torch.utils.checkpoint` keeps what it would compute again for a gradient."""
    around = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    place: Any = torch.utils.checkpoint
    kept = {"CheckpointFunction": _Kept, around.__name__: _Kept.around}
    if hasattr(place, f"{around.__name__}_impl"):  # torch 2.15 calls this one
        kept[f"{around.__name__}_impl"] = _Kept.around
    again = {name: getattr(place, name) for name in kept}
    vars(place).update(kept)
    try:
        yield
    finally:
        vars(place).update(again)


class _Looking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What sees every operation. Torch's compiler, two seconds to import, is kept out of it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Results(_Looking):
    def __init__(self, look: Callable[[list[Tensor]], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.look([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
        return result


class _Counted(_Looking):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=result)
        return result


def operations(function: Callable[[], object]) -> int:
    """Multiplications and additions in the products and convolutions of a call.

    As torch's own counter counts them, which imports its compiler on the way.
    """
    counted = _Counted()
    with counted:
        function()
    return counted.operations


@contextmanager
def unseen() -> Iterator[None]:
    """Within it, nothing above counts or looks, and tensors are made on the host, with numbers."""
    with torch._C._DisableTorchDispatch(), torch.device("cpu"):
        yield


@contextmanager
def looking_at_results(look: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """Within it, `look` is handed the tensors that each operation returns."""
    with _Results(look):
        yield
