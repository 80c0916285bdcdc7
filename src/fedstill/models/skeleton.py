"""The skeleton of a user's module: looked at once, then called with weights that are passed in.

What is found by looking: which tensors are weights, statistics or constants, which linear layer
makes the logits, whether the module draws random numbers. Its parameters lie on the meta device.
"""

from __future__ import annotations

import copy
import hashlib
import random
import re
import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial, wraps
from threading import RLock
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from fedstill.core.errors import BadValue
from fedstill.core.gpu import plain_on_cpu
from fedstill.core.model import batch_norm
from fedstill.core.pools import Quickly
from fedstill.core.records import Weights, is_buffer
from fedstill.core.texts import text_of
from fedstill.core.torch_internals import (
    in_transform,
    nothing_computed_again,
    unseen,
    writes_into,
)
from fedstill.models.random_calls import Seeded

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORM = re.compile(r"Norm(Act)?(\dd)?$")  # what kinds of norm layers are called
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NO_HEAD = "none"
COUNTER = "num_batches_tracked"
NOT_OWN = ("torch", "builtins", "typing", "abc")  # packages whose classes a user does not change
PROBES = 4  # examples of a pass that only looks
# Weights stand in a module for the time of a pass, and a start is drawn by the global generator:
# of several threads, as of sites that are tried in one process, one does so at a time.
_ALONE = RLock()


class Copied:
    """Copies of a module as it was when it was handed in; two of the same module are equal."""

    def __init__(self, module: nn.Module):
        self.original = module
        self.versions = tuple((id(t), writes_into(t)) for t in _tensors(module))
        try:
            self.kept = copy.deepcopy(module).cpu()
        except Exception as error:
            name = _title(type(module))
            told = f"{name}: cannot be copied: {type(error).__name__}: {error}"
            raise BadValue(told) from error

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.kept)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Copied):
            return False
        return self.original is other.original and self.versions == other.versions

    def __hash__(self) -> int:
        return hash((id(self.original), self.versions))


def _tensors(module: nn.Module) -> list[Tensor]:
    found = [*module.parameters(), *module.buffers()]
    return [tensor for tensor in found if not is_lazy(tensor)]


@dataclass(frozen=True)
class Origin:
    """What makes a module: a class or function with its arguments, or an instance to copy."""

    make: Callable[..., nn.Module]
    key: Any = ()  # the arguments, as values that can be compared
    positional: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    named: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    name: str = field(default="", compare=False)

    @classmethod
    def of(cls, source: Any, name: str = "") -> Origin:
        """The origin of a module, of its class, or of a function that builds it."""
        if isinstance(source, Origin):
            return source
        if isinstance(source, nn.Module):
            return cls(Copied(source), name=name or _title(type(source)))
        positional: tuple[Any, ...] = ()
        named: dict[str, Any] = {}
        while isinstance(source, partial):
            positional = (*source.args, *positional)
            named = {**source.keywords, **named}
            source = source.func
        if not callable(source):
            ours = "; ours have names in recipes, and are fedstill.ConvNet and the like in Python"
            raise BadValue(
                f"a network is a torch.nn.Module, its class, or a function that builds one, "
                f"not {reprlib.repr(source)}{ours if isinstance(source, str) else ''}"
            )
        key = (_comparable(positional), _comparable(named))
        return cls(source, key, positional, named, name or _title(source))

    @property
    def copies(self) -> bool:
        """Whether it copies an instance."""
        return isinstance(self.make, Copied)

    def built(self) -> nn.Module:
        """A module, drawn from the global generator as it likes."""
        module = self.make(*self.positional, **self.named)
        if not isinstance(module, nn.Module):
            raise BadValue(f"{self.name} gives {type(module).__name__}, not a torch.nn.Module")
        return module.cpu()


def _title(source: Any) -> str:
    name = getattr(source, "__qualname__", type(source).__qualname__)
    return f"{getattr(source, '__module__', '')}:{name}".removeprefix(":")


def _comparable(value: Any) -> Any:
    """An argument as something that can be hashed and compared."""
    if isinstance(value, Mapping):
        return tuple((key, _comparable(value[key])) for key in sorted(value, key=str))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(_comparable, value))
    try:
        hash(value)
    except TypeError as error:
        kind = type(value).__name__
        raise BadValue(
            f"an argument of a network must be a plain value, not {kind}; build it in a function"
        ) from error
    return (type(value).__name__, value)


@contextmanager
def global_draws(seed: int) -> Iterator[None]:
    """Draws of the host's global generators are those of a seed; they then stand where they stood.

    A constructor may also ask numpy's or Python's.
    """
    with _ALONE, torch.random.fork_rng(devices=[]):
        others: Any = np.random.get_state(), random.getstate()
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(others[0])
            random.setstate(others[1])


def _generators() -> dict[str, Any]:
    """Where the host's global generators stand."""
    numpys: Any = np.random.get_state()
    return {
        "torch's": torch.default_generator.get_state().tolist(),
        "numpy's": (numpys[1].tolist(), *numpys[2:]),
        "Python's": random.getstate(),
    }


@dataclass(frozen=True)
class Wishes:
    """What a user says of a module besides what made it."""

    head_layer: str | None = None  # None: found by a pass
    stage_layers: tuple[str, ...] | None = None
    fresh_head: bool = False  # the head is replaced by one for the number of classes


@lru_cache(maxsize=64)
def skeleton_of(origin: Origin, shape: tuple[int, ...], classes: int, wishes: Wishes) -> Skeleton:
    """The skeleton of a module for inputs of a shape; made once."""
    return Skeleton(origin, shape, classes, wishes)


@dataclass
class _Pass:
    """What layers must know of the pass they are in."""

    training: bool = False
    notes: Weights | None = None
    seen: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def _not_in_place(net: nn.Module) -> Iterator[None]:
    """Layers such as `nn.ReLU(inplace=True)` do not overwrite what they are given, as later."""
    layers: list[Any] = [m for m in net.modules() if getattr(m, "inplace", None) is True]
    for layer in layers:
        layer.inplace = False
    try:
        yield
    finally:
        for layer in layers:
            layer.inplace = True


class _HeadReached(Exception):
    """A pass for features goes no further than the head."""


def _tried(find: Callable[[Skeleton], bool]) -> cached_property[bool]:
    """What a trial finds out of a module, once; also where it is asked while shapes are counted."""

    @wraps(find)
    def found(skeleton: Skeleton) -> bool:
        with unseen():
            return find(skeleton)

    return cached_property(found)


class Skeleton:
    """A module without weights, and what was found out about it."""

    def __init__(self, origin: Origin, shape: tuple[int, ...], classes: int, wishes: Wishes):
        self.origin, self.shape, self.classes, self.wishes = origin, shape, classes, wishes
        self.now = _Pass()
        with torch.inference_mode(False), global_draws(0):
            net = self._copied(self._whole())  # a function may give out the same one again
            self._check_form(net)
            unasked = self._copied(net)
            self.probe, self.tokens = self._found_probe(net)
            self.head = self._found_head(net)
            net = self._headed(net)
            self._take_in(net)
            self._look(net)
            self.digest = self._digest(net, self.constants)
            copies = self.origin.copies
            self.digest_as_given = self._digest(net, net.state_dict()) if copies else self.digest
            self.stages = self._found_stages(net)
            self.unasked = self._headed(unasked).to("meta")  # all that it holds is passed in
            self.nets = self._for_devices(net)
        self._here: dict[torch.device, Weights] = {}

    def _refuse(self, why: str) -> BadValue:
        return BadValue(f"{self.origin.name}: {why}")

    def _copied(self, net: nn.Module) -> nn.Module:
        try:
            return copy.deepcopy(net)
        except Exception as error:
            raise self._refuse(f"cannot be copied: {type(error).__name__}: {error}") from error

    def _check_form(self, net: nn.Module) -> None:
        """Refuse what would be refused by torch alone, in words that do not help."""
        if isinstance(net, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise self._refuse("is spread over devices; give the module inside, net.module")
        moving = {name: p.dtype for name, p in net.named_parameters() if p.requires_grad}
        strange = [name for name, dtype in moving.items() if dtype != torch.float32]
        if strange:
            raise self._refuse(
                f"its weight {strange[0]} is of {moving[strange[0]]}, not of single precision; use "
                'net.float(), and engine.precision = "half" for a GPU'
            )
        held = [*net.named_parameters(), *net.named_buffers()]
        if sparse := [name for name, tensor in held if tensor.layout != torch.strided]:
            raise self._refuse(
                f"keeps {sparse[0]!r} as a sparse tensor, which is neither compared nor saved; "
                "keep it whole, by to_dense()"
            )

    def _whole(self) -> nn.Module:
        """A module whose every tensor has its shape."""
        try:
            net = self.origin.built()
        except BadValue:
            raise
        except Exception as error:
            raise self._refuse(f"cannot be built: {type(error).__name__}: {error}") from error
        if any(is_lazy(tensor) for tensor in net.parameters()):
            self._answer(net.eval(), torch.zeros(PROBES, *self.shape))
        return net

    @torch.no_grad()
    def _answer(self, net: nn.Module, x: Tensor) -> Tensor:
        """The logits for some examples, or why there are none."""
        before = writes_into(x)
        try:
            with _not_in_place(net), nothing_computed_again():
                logits = net(x)
        except Exception as error:
            shape = "x".join(map(str, self.shape))
            wrong = f"cannot take examples of {shape}: {type(error).__name__}: {error}"
            raise self._refuse(wrong) from error
        if writes_into(x) != before:
            raise self._refuse(
                "writes into its inputs, which others look at too; write x = x + 1 in place of "
                "x += 1 and x.clamp in place of x.clamp_, or begin with x = x.clone()"
            )
        if not isinstance(logits, Tensor):
            kind = type(logits).__name__
            raise self._refuse(f"must return logits as one tensor, not {kind}; wrap its forward")
        if logits.dim() != 2 or len(logits) != len(x):
            came = f"{list(logits.shape)} for {len(x)} examples"
            raise self._refuse(f"must return logits [example, class], not {came}")
        return logits

    def _found_probe(self, net: nn.Module) -> tuple[Tensor, bool]:
        """Some examples, the same for every module, and whether they are tokens.

        Where a module cannot take any numbers and has embeddings, they are rows of all of these.
        """
        rng = torch.Generator().manual_seed(0)
        numbers = torch.randn(PROBES, *self.shape, generator=rng)
        rows = [m.num_embeddings for m in net.modules() if isinstance(m, EMBEDDINGS)]
        _cast_tokens(net)
        if not rows:
            return numbers, False
        try:
            with torch.no_grad():
                net.eval()(numbers)
        except Exception:
            tokens = torch.randint(min(rows), (PROBES, *self.shape), generator=rng)
            return tokens.float(), True
        return numbers, False

    def _found_head(self, net: nn.Module) -> str | None:
        """The linear layer whose output is the logits."""
        asked, calls = self.wishes.head_layer, []
        layers = {name: m for name, m in net.named_modules() if isinstance(m, nn.Linear)}
        hooks = [
            layer.register_forward_hook(lambda _, into, out, name=name: calls.append((name, out)))
            for name, layer in layers.items()
        ]
        logits = self._answer(net.eval(), self.probe)
        for hook in hooks:
            hook.remove()
        if logits.shape[1] != self.classes and not self.wishes.fresh_head:
            raise self._refuse(
                f"gives {logits.shape[1]} logits for {self.classes} classes; build it with "
                f"{self.classes} outputs, or ask for fresh_head = true"
            )
        if asked == NO_HEAD:
            if self.wishes.fresh_head:
                raise self._refuse('fresh_head = true needs a head; head_layer is "none"')
            return None
        if asked is not None and asked not in layers:
            known = ", ".join(layers) or "none"
            raise self._refuse(f"has no linear layer {asked!r}; it has: {known}")
        made = [name for name, out in calls if not out.is_nested and torch.equal(out, logits)]
        if not made or (asked is not None and asked not in made):
            which = f"its layer {asked!r}" if asked else "its last linear layer"
            raise self._refuse(
                f"its logits are not what {which} gives; let forward return that, or set "
                f'head_layer = "{NO_HEAD}" to take the logits themselves for features'
            )
        head = made[-1] if asked is None else asked
        if "weight" not in dict(layers[head].named_parameters(recurse=False)):
            raise self._refuse(f'its head {head!r} computes its weight; set head_layer = "none"')
        return head

    def _headed(self, net: nn.Module) -> nn.Module:
        """The module with the head that was asked for."""
        if not self.wishes.fresh_head or self.head is None:
            return net
        old = net.get_submodule(self.head)
        assert isinstance(old, nn.Linear)
        fresh = nn.Linear(old.in_features, self.classes, bias=old.bias is not None)
        if not self.head:
            return fresh
        net.set_submodule(self.head, fresh)
        return net

    def _take_in(self, net: nn.Module) -> None:
        """Sort the tensors: weights and statistics that are passed in, constants, ties."""
        first: dict[int, str] = {}
        self.ties: dict[str, str] = {}  # another name of a weight, and its first
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.constants: Weights = {}
        for name, tensor in net.named_parameters(remove_duplicate=False):
            if not tensor.requires_grad:
                self.constants[name] = tensor.detach().clone()
            elif id(tensor) in first:
                self.ties[name] = first[id(tensor)]
            else:
                first[id(tensor)] = name
                self.shapes[name] = tuple(tensor.shape)
        counted = [
            f"{name}.{COUNTER}"
            for name, layer in net.named_modules()
            if isinstance(layer, BATCH_NORMS) and layer.momentum is None
        ]
        for name, buffer in net.named_buffers(remove_duplicate=False):
            if is_buffer(name) and (not name.endswith(COUNTER) or name in counted):
                self.shapes[name] = tuple(buffer.shape)
            else:
                self.constants[name] = buffer.detach().clone()
        self.counts = set(counted)
        self.norm_names = tuple(
            name
            for name in self.shapes
            if _NORM.search(type(net.get_submodule(name.rpartition(".")[0])).__name__)
        )
        kept = set(net.state_dict())
        self.saved = [n for n in (*self.shapes, *self.ties, *self.constants) if n in kept]
        if self.head is not None:
            names = [f"{self.head}.{last}".removeprefix(".") for last in ("weight", "bias")]
            known = [self.ties.get(name, name) for name in names]
            if known[0] not in self.shapes:
                raise self._refuse(f"its head {self.head!r} is frozen; let its weights be trained")
            self.head_names = (known[0], known[1] if known[1] in self.shapes else None)
        else:
            self.head_names = ("", None)
        if not any(not is_buffer(name) for name in self.shapes):
            raise self._refuse("has no weights that could be trained")

    def _norm(self, layer: nn.Module, name: str) -> Callable[..., Tensor]:
        """What a batch norm layer is played by; one whose own forward does something else is told.

        Ours takes the place of its forward, so all that stands in it must be known.
        """
        if type(layer).forward in {kind.forward for kind in BATCH_NORMS}:
            return _normalised
        if all(isinstance(getattr(layer, part, None), nn.Module) for part in ("drop", "act")):
            return _normalised_and_more
        raise self._refuse(
            f"its layer {name!r}, {type(layer).__name__}, is a batch norm with a forward of its "
            "own; write it as a batch norm and a layer behind it"
        )

    def _look(self, net: nn.Module) -> None:
        """Whether answers go by example, what pools, and if training draws, writes or remembers."""
        for name, layer in net.named_modules():
            if isinstance(layer, BATCH_NORMS):
                norm = self._norm(layer, name)
                layer.forward = partial(norm, self.now, layer, "")  # type: ignore[method-assign]
        x, stood = self.probe, _generators()
        with Quickly() as pools:
            together = self._answer(net.eval(), x)
        self.pools = pools.found
        if _generators()["torch's"] != stood["torch's"]:
            raise self._refuse(
                "draws random numbers in evaluation too; scores could not be repeated. Draw only "
                "if self.training: F.dropout(x, p, self.training)"
            )
        apart = torch.cat([self._answer(net, half) for half in x.chunk(2)])
        self.by_example = bool(torch.allclose(together, apart, atol=1e-4, rtol=1e-3))
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        self.now.training = True
        generator = torch.default_generator
        state = generator.get_state()
        self._answer(net.train(), x)
        self.draws = not torch.equal(generator.get_state(), state)
        state = generator.get_state()
        with Seeded(torch.tensor([1, 2])):
            once = self._answer(net, x)
        if not torch.equal(generator.get_state(), state):
            own = [n for n, m in net.named_modules() if isinstance(m, nn.RNNBase) and m.dropout]
            rest = [f": the dropout of {n!r}; put an nn.Dropout between its layers" for n in own]
            raise self._refuse(
                "draws random numbers in training otherwise than by dropout, bernoulli_, "
                f"rand_like or randn_like; runs could not be repeated{''.join(rest[:1])}"
            )
        moved = [who for who, state in _generators().items() if state != stood[who]]
        if set(moved) - {"torch's"}:
            raise self._refuse(
                f"draws random numbers from {moved[-1]} global generator in forward; runs could "
                "not be repeated. Use dropout, bernoulli_, rand_like or randn_like in training"
            )
        self.now.training = False
        for name, buffer in net.named_buffers():
            if name not in before or not _same(buffer, before[name]):
                raise self._refuse(
                    f"changes its buffer {name!r} in training, which only batch norm layers may"
                )
        self._look_again(net, once, together)

    def _look_again(self, net: nn.Module, once: Tensor, at_rest: Tensor) -> None:
        """Refuse a module that answers otherwise than before, in training or in evaluation."""
        self.now.training = True
        with Seeded(torch.tensor([1, 2])):
            again = self._answer(net.train(), self.probe)
        self.now.training = False
        with Quickly():  # as before: torch's own kernels differ inside a mode in their last digits
            at_rest_again = self._answer(net.eval(), self.probe)
        if not (_same(again, once) and _same(at_rest_again, at_rest)):
            raise self._refuse(
                "answers otherwise when it is asked again: it keeps a counter, a mean or a "
                "generator of its own in an attribute; runs could not be repeated. Keep means in "
                "batch norm layers, and draw by dropout, bernoulli_, rand_like or randn_like"
            )

    def _found_stages(self, net: nn.Module) -> tuple[str, ...]:
        """Layers before which maps are taken for stages: named, or the parts of a sequence."""
        wished = self.wishes.stage_layers
        if wished is not None:
            known = dict(net.named_modules())
            strange = [name for name in wished if name not in known]
            if strange:
                raise self._refuse(f"has no layer {strange[0]!r} for a stage")
            return wished
        if not isinstance(net, nn.Sequential):
            return ()
        # What enters a part with weights is what the part before it has made.
        mixing = [name for name, part in net.named_children() if _mixes(part)]
        outer = self.head.partition(".")[0] if self.head else ""
        return tuple(_before(net, name) for name in mixing[1:] if name != outer)

    def _for_devices(self, net: nn.Module) -> dict[str, nn.Module]:
        """A module without weights for each kind of device.

        What a module makes in a pass and keeps, such as a table of places, lies where the pass was.
        So beside this one, which was asked on the host, stand others that were asked nowhere.
        """
        self._without_weights(net)
        self._watch(net)
        kinds = ["meta", *(["cuda"] if torch.cuda.is_available() else [])]
        return {"cpu": net, **{kind: self._another() for kind in kinds}}

    def _another(self) -> nn.Module:
        """A module without weights that was never asked for anything."""
        net = copy.deepcopy(self.unasked)
        _cast_tokens(net)
        self._watch(net)
        return net

    @contextmanager
    def _on_trial(self) -> Iterator[None]:
        """Inside, another module is asked on the host, and what it keeps goes with it."""
        with _ALONE:
            own, self.nets["cpu"] = self.nets["cpu"], self._another()
            try:
                yield
            finally:
                self.nets["cpu"] = own

    def _watch(self, net: nn.Module) -> None:
        """Let norm layers note what they see, take stages, and stop features at the head."""
        for name, layer in net.named_modules():
            if isinstance(layer, BATCH_NORMS):
                norm = self._norm(layer, name)
                layer.forward = partial(norm, self.now, layer, name)  # type: ignore[method-assign]
            if isinstance(layer, nn.RNNBase):
                layer.forward = partial(_recurred, self.now, layer, layer.forward)
                layer.flatten_parameters = _left_alone  # type: ignore[method-assign]
            if isinstance(layer, nn.Hardsigmoid):  # torch's own has no second derivative
                layer.forward = _hard_sigmoid  # type: ignore[method-assign]
            if isinstance(getattr(layer, "inplace", None), bool):
                layer.inplace = False  # maps that were taken must stay
        for name in self.stages:
            net.get_submodule(name).register_forward_hook(
                lambda _, into, out, name=name: self.now.seen.__setitem__(name, out)
            )
        if self.head is not None:
            net.get_submodule(self.head).register_forward_pre_hook(self._at_head)

    def _at_head(self, layer: nn.Module, into: tuple[Tensor, ...]) -> None:
        self.now.seen["features"] = into[0]
        raise _HeadReached

    def _without_weights(self, net: nn.Module) -> None:
        """Put all that is passed in on the meta device, where it takes no room."""
        for name in (*self.shapes, *self.ties):
            owner, _, last = name.rpartition(".")
            layer = net.get_submodule(owner)
            held = getattr(layer, last)
            empty = held.detach().to("meta")
            setattr(layer, last, nn.Parameter(empty) if isinstance(held, nn.Parameter) else empty)

    def outputs(
        self, weights: Weights, x: Tensor, *, training: bool, notes: Weights | None,
        seed: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        """The stages, then the features: what enters the head, or the logits without one."""
        with _ALONE:
            return self._outputs(weights, x, training, notes, seed)

    def _outputs(
        self, weights: Weights, x: Tensor, training: bool, notes: Weights | None,
        seed: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        net = self.nets.get(x.device.type, self.nets["cpu"])
        net.train(training)
        self.now.training, self.now.notes = training, notes
        self.now.seen = {}
        given = {name: weights[name] for name in self.shapes if name in weights}
        given |= {name: weights[first] for name, first in self.ties.items() if first in weights}
        given |= self._constants_on(x.device)
        seed = seed if training and self.draws else None
        try:
            features = self._called(net, given, x, seed, training)
        except _HeadReached:
            features = self.now.seen["features"]
        seen, self.now.seen, self.now.notes = self.now.seen, {}, None
        return [*(seen[name] for name in self.stages), features]

    def _called(
        self, net: nn.Module, given: Weights, x: Tensor, seed: Tensor | None, training: bool
    ) -> Tensor:  # fmt: skip
        drawing = Seeded(seed) if training and self.draws else nullcontext()
        pooling = Quickly() if self.pools and plain_on_cpu(x) else nullcontext()
        # Weights stand in the module for this pass alone: later there is nothing to compute with.
        with drawing, pooling, plain_attention(), nothing_computed_again():
            return torch.func.functional_call(net, given, (x,), tie_weights=False)  # type: ignore[no-any-return]

    @_tried
    def twice(self) -> bool:
        """Whether gradients of gradients can be taken, as methods that match gradients do."""
        weights = self.fresh(0, given=True)
        moving = [weights[name].requires_grad_() for name in weights if not is_buffer(name)]
        with torch.enable_grad(), attention_by_products():
            try:
                seen = self._features(weights, self.probe)
                if not seen.requires_grad:  # the head alone is trained, which has all derivatives
                    return True
                first = torch.autograd.grad(
                    seen.square().sum(), moving, create_graph=True, materialize_grads=True,
                    allow_unused=True,
                )  # fmt: skip
                length = torch.stack([grad.square().sum() for grad in first]).sum()
                torch.autograd.grad(length, moving, allow_unused=True)
            except RuntimeError:
                return False
        return True

    @_tried
    def smooth(self) -> bool:
        """Whether gradients by inputs can be taken."""
        x = self.probe.clone().requires_grad_()
        with torch.enable_grad():
            try:
                seen = self._features(self.fresh(0, given=True), x)
                if not seen.requires_grad:
                    return False
                (way,) = torch.autograd.grad(seen.square().sum(), [x], allow_unused=True)
            except RuntimeError:
                return False
        return way is not None

    @_tried
    def stackable(self) -> bool:
        """Whether several can be trained as one, and torch does not loop over them, with a warning.

        Not if the module asks for the value of a tensor, has a layer that knows no stacks, or keeps
        of a stack what it then finds of no use.
        """
        if any(isinstance(layer, nn.LSTM) for layer in self.nets["cpu"].modules()):
            return False  # known without a trial, for which torch loads a great deal
        moving, still = self._two()
        seeds, x = torch.tensor([[1, 2], [3, 4]]), torch.stack([self.probe, self.probe])

        def loss(weights: Weights, x: Tensor, seed: Tensor) -> Tensor:
            parts = {**still, **weights}
            made = self.outputs(parts, x, training=True, notes={}, seed=seed)
            return made[-1].square().sum()

        def tried() -> None:
            torch.func.vmap(torch.func.grad(loss))(moving, x, seeds)
            self._features(self.fresh(0, given=True), self.probe)

        with self._on_trial():
            return _stacks(tried)

    @_tried
    def stackable_at_rest(self) -> bool:
        """Whether several can also be asked as one without a gradient: not with a GRU on a CPU."""
        if not self.stackable:
            return False
        moving, still = self._two()

        def features(weights: Weights) -> Tensor:
            return self._features({**still, **weights}, self.probe)

        with torch.no_grad():
            return _stacks(lambda: torch.func.vmap(features)(moving))

    def _two(self) -> tuple[Weights, Weights]:
        """The weights of two networks, stacked, and the statistics of one."""
        two = [self.fresh(seed, given=True) for seed in (0, 1)]
        moving = {n: torch.stack([one[n] for one in two]) for n in two[0] if not is_buffer(n)}
        return moving, {name: tensor for name, tensor in two[0].items() if is_buffer(name)}

    def _features(self, weights: Weights, x: Tensor) -> Tensor:
        """What enters the head, in evaluation."""
        return self.outputs(weights, x, training=False, notes=None, seed=None)[-1]

    def _constants_on(self, device: torch.device) -> Weights:
        if device not in self._here:
            self._here[device] = {n: tensor.to(device) for n, tensor in self.constants.items()}
        return self._here[device]

    def fresh(self, seed: int, *, given: bool) -> Weights:
        """Weights and statistics as the module's constructor draws them from a seed, on the host.

        An instance draws by its layers' `reset_parameters`, unless its `given` values are wanted.
        """
        with global_draws(seed):
            net = self._whole()
            if self.origin.copies and not given:
                self._redraw(net)
            net = self._headed(net)
        held = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        return {name: held[name].detach().clone() for name in self.shapes}

    def _redraw(self, net: nn.Module) -> None:
        for name, layer in net.named_modules():
            own = [n for n, p in layer.named_parameters(recurse=False) if p.requires_grad]
            redraw = getattr(layer, "reset_parameters", getattr(layer, "_reset_parameters", None))
            if redraw is not None:
                redraw()
            elif own:
                where = f"{name}.{own[0]}".removeprefix(".")
                raise self._refuse(
                    f"nothing says how its weight {where} is drawn anew; give the class or a "
                    'function that builds it, or start = "given", in Python '
                    'fedstill.Module(data.shape, data.classes, net, start="given")'
                )

    def state_dict(self, weights: Weights) -> Weights:
        """Weights as the user's own module loads them: with ties, constants and counters."""
        everything = {**self.constants, **weights}
        everything |= {name: weights[first] for name, first in self.ties.items()}
        return {name: everything[name] for name in self.saved}

    def module(self, weights: Weights) -> nn.Module:
        """The user's own module with these weights, in evaluation mode."""
        with global_draws(0):
            net = self._headed(copy.deepcopy(self._whole()))
        net.load_state_dict(self.state_dict(weights))
        return net.eval()

    def _digest(self, net: nn.Module, values: Weights) -> str:
        """What tells this module from others in another process: its code, form and values."""
        found = hashlib.sha256(repr(net).encode())
        code: set[Any] = {kind for layer in net.modules() for kind in type(layer).__mro__}
        code |= set() if self.origin.copies else {self.origin.make}
        own = [each for each in code if str(each.__module__).partition(".")[0] not in NOT_OWN]
        for text in sorted(map(_source, own)):
            found.update(text.encode())
        for name, tensor in values.items():
            held = tensor.cpu().contiguous().flatten().view(torch.uint8)  # numpy lacks some types
            found.update(name.encode() + held.numpy().tobytes())
        return found.hexdigest()[:16]


def _stacks(trial: Callable[[], Any]) -> bool:
    """Whether torch computes something for a stack of networks, and not one by one."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            trial()
        except RuntimeError:
            return False
    return not any("batching rule" in str(warning.message) for warning in told)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers of two tensors are equal; what is no number equals itself."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def plain_attention() -> AbstractContextManager[None]:
    """Inside a transform of `torch.func`, attention as matrix products.

    Torch's quicker kernels know no stacks, where they would run network by network with a warning,
    and no gradients of gradients.
    """
    return attention_by_products() if in_transform() else nullcontext()


@contextmanager
def attention_by_products() -> Iterator[None]:
    """Inside, attention is made of products of matrices, of which all derivatives are known."""
    whole_layers = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(whole_layers)


def _cast_tokens(net: nn.Module) -> None:
    """Let embeddings take whole numbers as the floats that all inputs are."""
    for layer in net.modules():
        if isinstance(layer, EMBEDDINGS):
            layer.sparse = False  # gradients are added to others
            look_up = type(layer).forward
            layer.forward = partial(_looked_up, look_up, layer)  # type: ignore[method-assign]


def _looked_up(
    look_up: Callable[..., Tensor], layer: Any, tokens: Tensor, *more: Any, **named: Any
) -> Tensor:
    """What an embedding finds for tokens."""
    try:
        return look_up(layer, tokens.long(), *more, **named)
    except IndexError as error:
        raise BadValue(
            f"tokens are whole numbers from 0 below {layer.num_embeddings}, the rows of the "
            "embedding, but others are among them"
        ) from error


def _source(code: Any) -> str:
    """The text of a class or function, or its name where there is no text."""
    return text_of(code) or str(getattr(code, "__qualname__", repr(type(code))))


def _recurred(
    now: _Pass, layer: nn.RNNBase, forward: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """A recurrent layer; by cuDNN only where that knows all that may be asked of it.

    Its kernels have a gradient in training alone, none of that gradient, and know no stacks.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = (
        before and not in_transform() and (now.training or not torch.is_grad_enabled())
    )
    if type(layer) in (nn.RNN, nn.GRU) and len(args) == 1 and not named and in_transform():
        args = (*args, _unmoved(layer, args[0]))
    try:
        return forward(*args, **named)
    finally:
        torch.backends.cudnn.enabled = before


def _unmoved(layer: nn.RNNBase, x: Any) -> Tensor | None:
    """The state that torch begins with, but a stack where the input is one.

    Torch writes what it reads of single examples into what it makes of the state.
    """
    if not isinstance(x, Tensor):  # a packed sequence
        return None
    several = [x.shape[0 if layer.batch_first else 1]] if x.dim() == 3 else []
    ways = layer.num_layers * (2 if layer.bidirectional else 1)
    return x.new_zeros(ways, *several, layer.hidden_size)


def _left_alone() -> None:
    """Weights lie where whoever passes them in has put them, and are not moved in memory."""


def _hard_sigmoid(input: Tensor) -> Tensor:
    return F.relu6(input + 3) / 6


def _mixes(part: nn.Module) -> bool:
    """Whether a part holds a layer that mixes channels: not a norm alone."""
    return any(p.dim() > 1 for p in part.parameters())


def _before(net: nn.Sequential, name: str) -> str:
    """The part that stands before another in a sequence."""
    names = [n for n, _ in net.named_children()]
    return names[names.index(name) - 1]


def _normalised(now: _Pass, layer: Any, name: str, x: Tensor) -> Tensor:
    """A batch norm layer, whose new statistics go to the notes of the pass.

    One example alone has no variance: where a channel has a single value, training goes by the
    running statistics and notes nothing. So it does where the module's own `train` leaves the layer
    in evaluation, as those do that freeze norms.
    """
    mean, var = layer.running_mean, layer.running_var
    training = now.training and layer.training
    numbers = x.numel() // x.shape[1] if x.dim() > 1 else 0
    by_batch = (training and numbers > 1) or mean is None
    if not now.training and now.notes is not None and mean is not None:
        over = [0, *range(2, x.dim())]
        now.notes[f"{name}.running_mean"] = x.mean(over)
        now.notes[f"{name}.running_var"] = x.var(over, unbiased=False)
    if by_batch and training and now.notes is not None and mean is not None:
        _note(now.notes, layer, name, x)
    if by_batch:
        mean = var = None
    return batch_norm(x, mean, var, layer.weight, layer.bias, layer.eps)


def _normalised_and_more(now: _Pass, layer: Any, name: str, x: Tensor) -> Tensor:
    """A batch norm layer that drops and activates what it has normalised, as timm's do."""
    made: Tensor = layer.act(layer.drop(_normalised(now, layer, name, x)))
    return made


def _note(notes: Weights, layer: Any, name: str, x: Tensor) -> None:
    """The running statistics after a batch; without a momentum they are plain means."""
    over, seen = [0, *range(2, x.dim())], x.detach().float()
    share: Any = layer.momentum
    if share is None:
        count = notes[f"{name}.{COUNTER}"] = layer.num_batches_tracked + 1
        share = 1 / count
    for key, latest in (("mean", seen.mean(over)), ("var", seen.var(over, unbiased=True))):
        running = getattr(layer, f"running_{key}")
        notes[f"{name}.running_{key}"] = (1 - share) * running + share * latest
