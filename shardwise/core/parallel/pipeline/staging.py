"""Division of a model into pipeline stages: its modules by rank, and its forward pass as that of a stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.core.base.validate import UnknownModelError
from shardwise.core.parallel.module_classes import mixed_class, modules_in_table
from shardwise.core.parallel.pipeline.schedule import rank_of_stage


@dataclass(frozen=True)
class Body:
    """Describes the module whose forward pass runs the layers in order, so that it can be divided into stages.

    Modules that are not named here come after the layers, and so do modules outside of the body: they belong to the
    last stage, and calling one before the layers is an error.

    Attributes:
        layers: the path of its list of layers.
        tokens: the token embedding, called first. It belongs to the first stage.
        zeros: modules whose output is added to the embedding (positions); they return 0 in later stages.
        before: modules between the embedding and the layers (dropout, a norm); later stages skip them.
        everywhere: modules that every stage calls (rotary embeddings; outside of the body, modules that change the
            inputs, by their name in the model). They may not have trainable parameters.
        tuples: a layer returns a tuple whose first element is the hidden state.

    Examples:
        >>> body = shardwise.Body(layers="blocks", tokens="embedding", before=("dropout",))
    """

    layers: str = "layers"
    tokens: str = "embed_tokens"
    zeros: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    tuples: bool = False


_ROTARY = Body(everywhere=("rotary_emb", "rotary_emb_local"))
_LLAMA_LIKE = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "Gemma2", "Cohere")

TABLES: dict[str, Body] = {f"{name}Model": _ROTARY for name in _LLAMA_LIKE} | {
    "DeepseekV2Model": _ROTARY,
    "DeepseekV3Model": _ROTARY,
    "Gemma3TextModel": _ROTARY,
    "BertModel": Body(layers="encoder.layer", tokens="embeddings"),
    "BloomModel": Body(layers="h", tokens="word_embeddings", before=("word_embeddings_layernorm",), tuples=True),
    "FalconModel": Body(layers="h", tokens="word_embeddings", everywhere=("rotary_emb",), tuples=True),
    "GPT2Model": Body(layers="h", tokens="wte", zeros=("wpe",), before=("drop",)),
    "GPTJModel": Body(layers="h", tokens="wte", before=("drop",), tuples=True),
    "GPTNeoXModel": replace(_ROTARY, tokens="embed_in", before=("emb_dropout",)),
    "OPTDecoder": Body(zeros=("embed_positions",), before=("project_in",)),
}
"""Entries by the class name of the body."""


def known_bodies() -> tuple[str, ...]:
    """Return the names of all registered classes, sorted.

    Examples:
        >>> "LlamaModel" in shardwise.known_bodies()
        True
    """
    return tuple(sorted(TABLES))


def register_body(class_name: str, body: Body) -> None:
    """Register how models with a module of this class are divided into stages. Call it on every rank.

    Args:
        class_name: name of the class whose forward pass runs the layers.
        body: the names of its submodules.

    Examples:
        >>> shardwise.register_body("MyDecoder", shardwise.Body(layers="blocks", tokens="embedding"))
    """
    TABLES[class_name] = body


ONE_TENSOR = (
    "have each layer take and return one tensor, with what else goes from layer to layer put into it (torch.cat, "
    "torch.stack), or use pp=1 (pp_size=1); where a layer returns a tuple of which the model uses the first alone, "
    "describe it with Body(tuples=True) (shardwise.register_body)"
)
OF_ALL_LAYERS = ("output_router_logits", "output_hidden_states", "output_attentions")
"""Outputs that models collect from every layer, and that losses may use."""


def layers_of_stages(layers: int, stages: int, chosen: Sequence[int] | None = None) -> list[int]:
    """Return the number of layers of each stage: ``chosen``, or an even division with the larger stages in the middle,
    since the first and the last have the embedding and the head.

    Raises:
        ValueError: fewer layers than stages, or ``chosen`` does not add up to ``layers``.
    """
    if chosen is not None:
        if len(chosen) != stages or sum(chosen) != layers or min(chosen) < 1:
            raise ValueError(
                f"layers={list(chosen)} does not fit {stages} stages of a model with {layers} layers; give {stages} "
                f"numbers >= 1 whose sum is {layers}"
            )
        return list(chosen)
    if layers < stages:
        raise ValueError(f"{layers} layers are too few for {stages} stages; use at most {layers} stages")
    extra = layers % stages
    first = (stages - extra) // 2
    return [layers // stages + (first <= stage < first + extra) for stage in range(stages)]


# [Note: What staging changes]
# A rank runs the model's own forward pass once for each of its stages, with the inputs that every stage gets: masks,
# positions and losses are computed as they are without stages. Each module of another stage is replaced by a stand-in
# without parameters, so parameter names do not change.
# * Before a stage's own layers, the embedding's stand-in returns a sentinel (NaN) of the hidden state's shape, and
#   others return their input. The first own layer that is called takes the tensor from the stage before in place of
#   its argument. So what the model computes between its modules counts once, in the stage that runs the layer before.
# * Before the last stage, the pass ends at the first call of a layer of the next stage: its argument is what is sent.
# * A model that uses an earlier output again (a skip connection across stages) computes with the sentinel. Its backward
#   pass raises an error; a forward pass alone gives NaN.
# * Where a rank has several stages, the modules of those that do not run are skipped in the same way.
# Until install() nothing is changed. A module of the last stage that is called before the layers is an error.
class _Sentinel(torch.autograd.Function):
    """Returns NaN as a sentinel for a hidden state that this stage does not have."""

    @staticmethod
    def forward(ctx: Any, arrived: Tensor, message: str) -> Tensor:
        ctx.message = message
        ctx.set_materialize_grads(False)
        if arrived.is_floating_point():
            return torch.full_like(arrived, float("nan"))
        return torch.zeros_like(arrived)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        if grad is not None and bool(grad.any()):  # a reentrant checkpoint passes zeros for unused outputs
            raise RuntimeError(ctx.message)
        return None, None


class _Alias(torch.autograd.Function):
    """Returns the same memory as neither a leaf nor a view, since a layer may begin with an in-place operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Staging:
    """The division of one model into the stages of a pipeline.

    Args:
        model: the full model.
        name: name of its body.
        body: description of the body.
        rank: pipeline rank of this process.
        ranks: number of pipeline ranks.
        counts: number of layers by stage.
        v_shaped: assignment of stages to ranks, see :func:`~shardwise.core.parallel.pipeline.schedule.rank_of_stage`.

    Attributes:
        own: stages of this rank.
        stages: number of stages.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        body: Body,
        rank: int,
        ranks: int,
        counts: Sequence[int],
        v_shaped: bool = False,
    ) -> None:
        self.model, self.body, self._body_name = model, model.get_submodule(name), name
        self.table = body
        self.rank, self.ranks, self.stages = rank, ranks, len(counts)
        self._v_shaped = v_shaped
        self.own = tuple(stage for stage in range(self.stages) if self.rank_of_stage(stage) == rank)
        self.active = self.own[0]
        self.arrived: Tensor | None = None
        self._running = False
        self._consumer: str | None = None
        self._units = self._find_units(counts)
        self._check_apart()
        self._undo: list[tuple[nn.Module, str, nn.Module]] = []
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        self._stage_of_param = self._find_params()
        self._check: RemovableHandle | None = None
        self._model_names = inspect.signature(type(model).forward).parameters

    def _find_units(self, counts: Sequence[int]) -> dict[str, tuple[int, str]]:
        """Return the stage and the role of each module that is replaced as a unit, by module name."""
        prefix = f"{self._body_name}." if self._body_name else ""
        table, last = self.table, self.stages - 1
        roles = {prefix + table.tokens: "tokens"}
        roles |= {prefix + name: "zeros" for name in table.zeros} | {prefix + name: "through" for name in table.before}
        layers = prefix + table.layers
        stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
        way = {"", *accumulate(layers.split("."), "{}.{}".format)}
        units: dict[str, tuple[int, str]] = {}
        for name in way - {layers}:
            for child, _ in self.model.get_submodule(name).named_children():
                full = f"{name}.{child}" if name else child
                if full in way or full.removeprefix(prefix) in table.everywhere:
                    continue
                units[full] = (0, roles[full]) if full in roles else (last, "after")
        units |= {f"{layers}.{index}": (stage, "layer") for index, stage in enumerate(stage_of)}
        return units

    def _check_apart(self) -> None:
        """Check that no module is in several stages of one rank, since its current stage would be ambiguous.

        Raises:
            ValueError: there is such a module.
        """
        names: dict[tuple[int, nn.Module], tuple[str, int]] = {}
        for name, (stage, _) in self._units.items():
            rank = self.rank_of_stage(stage)
            first, its = names.setdefault((rank, self.model.get_submodule(name)), (name, stage))
            if its != stage:
                raise ValueError(
                    f"{first} and {name} of the {type(self.model).__name__} are one module, in stages {its} and "
                    f"{stage} of rank {rank}: make it two modules with the same parameters ({name}.weight = "
                    f"{first}.weight, and so on), or give each rank one stage (chunks=1; pp_style='1f1b')"
                )

    def _find_params(self) -> dict[int, set[int]]:
        stages_by_param: dict[int, set[int]] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            unit = next((unit for unit in self._units if name.startswith(f"{unit}.")), None)
            stages = {self._units[unit][0]} if unit is not None else set(range(self.stages))
            stages_by_param.setdefault(id(param), set()).update(stages)
        self._positions = {key: place for place, key in enumerate(stages_by_param)}
        return stages_by_param

    # ---- queries

    def stages_of(self, param: nn.Parameter) -> tuple[int, ...]:
        """Return the stages that use the parameter. A tied parameter may have several."""
        return tuple(sorted(self._stage_of_param[id(param)]))

    def rank_of_stage(self, stage: int) -> int:
        """Return the rank that has ``stage``."""
        return rank_of_stage(stage, self.ranks, self._v_shaped)

    @property
    def last_rank(self) -> int:
        """The rank with the last stage, which has outputs and losses."""
        return self.rank_of_stage(self.stages - 1)

    def ranks_of(self, param: nn.Parameter) -> tuple[int, ...]:
        """Return the ranks that hold the parameter."""
        return tuple(sorted({self.rank_of_stage(stage) for stage in self.stages_of(param)}))

    def position_of(self, param: nn.Parameter) -> int:
        """Return the position among the parameters of the full model. It is equal on every rank."""
        return self._positions[id(param)]

    def rank_of(self, name: str) -> int:
        """Return the first rank that has the buffer or module ``name``."""
        unit = next((unit for unit in self._units if name.startswith(f"{unit}.")), None)
        return self.rank_of_stage(self._units[unit][0]) if unit is not None else 0

    def owns(self, param: nn.Parameter) -> bool:
        """Return True if this rank holds the parameter."""
        return self.rank in self.ranks_of(param)

    # ---- install and remove

    def install(self) -> None:
        """Reduce the model to the modules and parameters of this rank's stages."""
        for name, (stage, role) in self._units.items():
            parent_name, _, child = name.rpartition(".")
            parent = self.model.get_submodule(parent_name)
            module = parent.get_submodule(child)
            if stage not in self.own:
                self._undo.append((parent, child, module))
                setattr(parent, child, _Away(self, name, stage, module))
            elif (len(self.own) > 1 or role == "layer") and "_stage" not in vars(module):
                self._classes.append((module, type(module)))
                module.__dict__["_stage"] = self, name, stage
                module.__class__ = mixed_class(type(module), _StageLayer, type(module))
        self.model.forward = self._forward
        self._check = self.body.register_forward_pre_hook(_check_arguments, prepend=True, with_kwargs=True)

    def remove(self) -> None:
        """Undo :meth:`install`. Parameter values are not restored."""
        self.model.__dict__.pop("forward", None)
        if self._check is not None:
            self._check.remove()
        for parent, child, module in self._undo:
            setattr(parent, child, module)
        for module, kind in self._classes:
            module.__class__ = kind
            module.__dict__.pop("_stage", None)
        self._undo.clear()
        self._classes.clear()

    def forget(self) -> None:
        """Drop the references to modules of other ranks."""
        self._undo.clear()

    # ---- forward passes

    def run(self, stage: int, arrived: Tensor | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a stage, and return its hidden state, or the model's output for the last stage.

        Args:
            stage: a stage of this rank.
            arrived: the hidden state of the previous stage; ``None`` for the first.
            args, kwargs: the model's inputs.
        """
        self.enter(stage, arrived)
        self._running = True
        try:
            return self.model(*args, **kwargs)
        finally:
            self._running = False

    def enter(self, stage: int, arrived: Tensor | None) -> None:
        """Set ``stage`` as the stage that runs, or whose backward pass recomputes."""
        self.active, self.arrived = stage, arrived
        self._consumer = getattr(arrived, "consumer", None)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._running:
            raise RuntimeError(
                f"this rank has {len(self.own)} of the {self.stages} stages of the {type(self.model).__name__}, so it "
                "cannot be called: call session.pipeline.step(batch, criterion), or execute_pipeline(). "
                "Under torch.no_grad() they run only the forward pass"
            )
        check_of_all_layers(kwargs, type(self.model).__name__)
        if "use_cache" in self._model_names:
            kwargs["use_cache"] = False
        try:
            output = type(self.model).forward(self.model, *args, **kwargs)
        except _Enough as enough:
            return enough.hidden
        if self.active != self.stages - 1:
            raise RuntimeError(
                f"{type(self.model).__name__} never called a layer of stage {self.active + 1}; report this"
            )
        return output

    def stand_in(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the output of the module ``name``, which belongs to another stage.

        Raises:
            RuntimeError: the module cannot be skipped here.
        """
        stage, role = self._units[name]
        if role in ("tokens", "zeros"):
            if self.arrived is None:
                raise RuntimeError(f"stage {self.active} was given nothing, and is not the first; report this")
            if role == "zeros":
                return self.arrived.new_zeros(())
            return _Sentinel.apply(self.arrived, self._reused())  # type: ignore[no-untyped-call]
        if role == "after":
            raise RuntimeError(
                f"the {type(self.model).__name__} calls {name} before the layers of stage {self.active}, which does "
                f"not have it: modules that the description of {type(self.body).__name__} does not name come after the "
                f"layers. Describe that class with {name} in Body.everywhere if every stage is to call it, or, where "
                "hidden states go through it, in Body.before (shardwise.register_body)"
            )
        hidden = args[0] if args else next(iter(kwargs.values()))
        if role == "layer" and stage > self.active:
            raise _Enough(self._input_of(name, hidden) if self._consumer is None else self._one_tensor(name, hidden))
        if role == "layer":
            self._one_tensor(name, hidden)
            if self._running and self._consumer is not None:
                raise RuntimeError(
                    f"the {type(self.model).__name__} calls {name} after layers of stage {self.active}, but it belongs "
                    "to an earlier stage: layers have to be called once, in their order; use pp=1 (pp_size=1)"
                )
        return (hidden,) if role == "layer" and self.table.tuples else hidden

    def own_layer(self, name: str, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run ``call``, the layer ``name`` of the current stage, on the stage's input if it is the first layer.

        Raises:
            TypeError: the hidden state is not one tensor.
        """
        if args:
            args = self._input_of(name, args[0]), *args[1:]
        elif kwargs:
            first, *_ = kwargs
            kwargs = {**kwargs, first: self._input_of(name, kwargs[first])}
        made = call(*args, **kwargs)
        hidden = made[0] if self.table.tuples and isinstance(made, tuple) and made else made
        if not isinstance(hidden, Tensor):
            raise TypeError(
                f"{name} of the {type(self.model).__name__} returns a {type(hidden).__name__}, and stages pass a "
                f"hidden state of one tensor: {ONE_TENSOR}"
            )
        return made

    def _input_of(self, name: str, hidden: object) -> Tensor:
        """Return the stage's input if ``name`` is the first of its layers that is called, otherwise ``hidden``.

        A layer that is recomputed in the backward pass gets the same input.
        """
        hidden = self._one_tensor(name, hidden)
        if self.arrived is None or self._consumer not in (None, name):
            return hidden
        if self._running and self._consumer == name:
            raise RuntimeError(
                f"the {type(self.model).__name__} calls {name} twice in stage {self.active}: layers have to be called "
                "once, in their order; use pp=1 (pp_size=1)"
            )
        self._consumer = self.arrived.consumer = name  # type: ignore[attr-defined]
        own: Tensor = _Alias.apply(self.arrived)  # type: ignore[no-untyped-call]
        return own

    def _one_tensor(self, name: str, hidden: object) -> Tensor:
        if not isinstance(hidden, Tensor):
            raise TypeError(
                f"the {type(self.model).__name__} calls {name} with a {type(hidden).__name__} for its hidden state: "
                f"{ONE_TENSOR}"
            )
        return hidden

    def _reused(self) -> str:
        return (
            f"the {type(self.model).__name__} uses the output of {type(self.body).__name__}.{self.table.tokens} or of "
            f"a layer of an earlier stage again in stage {self.active}, which has only the hidden state that stage "
            f"{self.active - 1} sent. Carry it inside of the hidden state (torch.cat, torch.stack), or use pp=1 "
            "(pp_size=1)"
        )

    def is_layer(self, name: str) -> bool:
        """Return True if the module ``name`` is one of the layers."""
        return self._units[name][1] == "layer"


class _Enough(BaseException):
    """Ends a forward pass after a stage's last layer; not an error."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Away(nn.Module):
    """Replaces a module of another rank."""

    _stage: Any
    _instead_of: str

    def __init__(self, staging: Staging, name: str, stage: int, module: nn.Module) -> None:
        super().__init__()
        own = vars(self)
        self.__dict__["_stage"] = staging, name, stage
        self.__dict__["_instead_of"] = type(module).__name__
        # Attributes that models read from their layers, in addition to calling them.
        self.__dict__.update(
            {name: value for name, value in vars(module).items() if name not in own and _is_plain(value)}
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        staging, name, _ = self._stage
        return staging.stand_in(name, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_stage" not in vars(self):
                raise
        staging, own_name, stage = self._stage
        raise AttributeError(
            f"the {type(staging.model).__name__} asks {own_name} for {name!r} in stage {staging.active}: that "
            f"{self._instead_of} is in stage {stage}, on another rank, and can be called here alone. Where a weight of "
            "it is used once more give that use a module of its own and tie the two (head.weight = embed.weight): each "
            "rank has it then, and its gradients are added up"
        )

    def extra_repr(self) -> str:
        return f"a {self._instead_of} of stage {self._stage[2]}"


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | tuple | list | torch.dtype | type(None))


class _StageLayer(nn.Module):
    """A module that is skipped, with its hooks, while another stage of its rank runs."""

    _stage: Any

    @property
    def is_skipped(self) -> bool:
        return bool(self._stage[0].active != self._stage[2])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        staging, name, _ = self._stage
        if self.is_skipped:
            return staging.stand_in(name, args, kwargs)
        if staging.is_layer(name):
            return staging.own_layer(name, super().__call__, args, kwargs)
        return super().__call__(*args, **kwargs)


def check_of_all_layers(settings: Mapping[str, Any], whose: str) -> None:
    """Check that no output of all layers is requested, since the last stage has only those of its own layers.

    Raises:
        ValueError: such an option is requested.
    """
    for name in OF_ALL_LAYERS:
        if settings.get(name):
            raise ValueError(
                f"{name}={settings[name]} for a {whose} in pipeline stages: the last stage only has the outputs of its "
                "own layers; leave it False (a loss of all routers needs pp=1)"
            )


@cache
def _names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the argument names of ``forward`` without ``self``."""
    return tuple(inspect.signature(forward).parameters)[1:]


def _check_arguments(body: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of every call of the body, including calls from within a model."""
    arguments = {**dict(zip(_names_of(type(body).forward), args, strict=False)), **kwargs}
    settings = {name: getattr(getattr(body, "config", None), name, False) for name in OF_ALL_LAYERS}
    settings |= {name: arguments[name] for name in OF_ALL_LAYERS if arguments.get(name) is not None}
    check_of_all_layers(settings, type(body).__name__)


def stage_model(
    model: nn.Module,
    rank: int,
    ranks: int,
    chunks: int = 1,
    layers_by_stage: Sequence[int] | None = None,
    body: Body | None = None,
    v_shaped: bool = False,
) -> Staging:
    """Divide ``model`` into stages. The model is not changed until :meth:`Staging.install`.

    Args:
        model: the full model.
        rank: pipeline rank of this process.
        ranks: number of pipeline ranks.
        chunks: stages per rank.
        layers_by_stage: number of layers of each stage.
        body: describes the model itself, if its class is not registered.
        v_shaped: assignment of stages to ranks, see :func:`~shardwise.core.parallel.pipeline.schedule.rank_of_stage`.

    Raises:
        UnknownModelError: the model's class is not registered.
        ValueError: the model has too few layers, or its configuration asks for outputs of all layers.
    """
    bodies = modules_in_table(model, TABLES) if body is None else [("", model, body)]
    if not bodies:
        raise UnknownModelError(
            f"{type(model).__name__} cannot be divided into stages: it has no module of a known class "
            f"({', '.join(known_bodies())}). Describe it with shardwise.register_body(class name, Body(...)) (see "
            '"Pipelines" in docs/hybrid-parallel.md)'
        )
    if len(bodies) > 1:
        raise ValueError(
            f"{type(model).__name__} has several bodies ({', '.join(name or '(itself)' for name, *_ in bodies)}): only "
            "a model with one body can be divided into stages; use pp=1"
        )
    config = getattr(model, "config", None)
    check_of_all_layers({name: getattr(config, name, False) for name in OF_ALL_LAYERS}, type(model).__name__)
    name, owner, table = bodies[0]
    layers = owner.get_submodule(table.layers)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(owner).__name__}.{table.layers} is a {type(layers).__name__}; name an nn.ModuleList in Body.layers"
        )
    counts = layers_of_stages(len(layers), ranks * chunks, layers_by_stage)
    staging = Staging(model, name, table, rank, ranks, counts, v_shaped)
    for name in table.everywhere:
        if any(param.requires_grad for param in getattr(owner, name, nn.Module()).parameters()):
            raise ValueError(
                f"{type(owner).__name__}.{name} is in Body.everywhere and has trainable parameters; "
                "freeze them, or use pp=1"
            )
    return staging
