"""What the contract is held to: the hooks that a subclass fills in, the verbs that scenarios are written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from attrs import frozen

from ..adapters.reader import LayerReader
from ..adapters.specs import GatedMLPSpec, KernelSpec, LayerSpec, Parallel
from .compare import attention_first, differences, is_attention, linears_of, misfit, without_index
from .scenario import BrokenContractError, Verbs, to_set

if TYPE_CHECKING:
    from ..registry.catalog import ModelEntry
    from ..registry.lookup import Registry

E = TypeVar("E", bound=BaseException)


@frozen
class Sample:
    """One layer of the model, of a kind that no other sample has."""

    path: str
    layer: Any
    reader: LayerReader
    spec: Any

    def __str__(self) -> str:
        return f"{self.path} ({self.reader.key})"


class ContractCase(Verbs):
    """A model, the entry that declares it, and the registry that reads it."""

    model: ClassVar[str] = to_set("model", 'the name of a declared model, as model = "gpt-oss-20b"')
    "The entry's name."
    registry: ClassVar[Registry | None] = None
    "The registry that knows it; None: the default one."
    engine: ClassVar[str | None] = None
    "Whose epsilons the entry should give; None: of the package that the attention classes belong to."
    parallel: ClassVar[Parallel | None] = None
    "Passed to every read, where layers do not say how they were sharded."
    decoder_layers: ClassVar[bool] = True
    "False where only the attention classes are taught, and not the decoder layer and the model with their norms and MLPs."

    # ---- hooks

    def build(self) -> Any:
        """The model with its published dimensions, not sharded. On the meta device it needs no memory."""
        raise NotImplementedError(f"{type(self).__name__}.build() must return the model to hold to the contract")

    def build_small(self) -> Any | None:
        """A small model with the true widths of heads and latents that runs on this machine, or None: C14 is skipped."""
        return None

    def build_sharded(self, size: int, rank: int) -> Any | None:  # noqa: ARG002
        """The model as one rank of an engine builds it, or None where the engine shards weights as DTensors or not at all."""
        return None

    def tp_plan(self) -> Mapping[str, str]:
        """The model's own tensor-parallel plan, as transformers writes it: path pattern -> style. Empty without one."""
        config = vars(self.built()).get("config")
        text = config.get_text_config() if hasattr(config, "get_text_config") else None
        plan: Mapping[str, str] | None = getattr(text, "base_model_tp_plan", None)
        return plan or {}

    def call(self, model: Any) -> Any:
        """One forward pass of `build_small()`'s model: a tensor, or something with `logits`."""
        import torch

        return model(input_ids=torch.arange(8).reshape(1, 8), use_cache=False)

    # ---- what scenarios ask for

    @property
    def asked(self) -> Registry:
        """The registry under test."""
        if self.registry is not None:
            return self.registry
        from .. import registry

        return registry.default

    @property
    def entry(self) -> ModelEntry:
        """The declaration."""
        return self.asked.model(self.model)

    def built(self) -> Any:
        """The model, built once for the class."""
        own = vars(type(self))
        if "_built" not in own:
            type(self)._built = self.build()  # type: ignore[attr-defined]
        return vars(type(self))["_built"]

    def found(self) -> list[tuple[str, Any]]:
        """(path, spec) of the model's layers."""
        return self.held(self.asked.specs_in(self.built(), parallel=self.parallel))

    def held(self, pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Those that are held to the contract: of the MLPs, only where the entry declares any."""
        if not self.decoder_layers:
            return [(path, spec) for path, spec in pairs if is_attention(spec)]
        if not self.entry.mlps:
            return [pair for pair in pairs if not isinstance(pair[1], GatedMLPSpec)]
        return attention_first(pairs)

    def declared(self, tp: int = 1, rank: int | None = None, engine: str | None = None) -> list[tuple[str, LayerSpec]]:
        """(name, spec) of the entry's layers on one rank."""
        return self.held(self.entry.specs(tp, rank, engine=engine or self.engine))

    def engine_of(self, found: list[tuple[str, Any]], model: Any) -> str | None:
        """Whose epsilons to expect: the top package of the class that holds the attention."""
        if self.engine is not None:
            return self.engine
        modules = dict(model.named_modules())
        attention = next((path for path, spec in found if is_attention(spec)), None)
        readers = self.asked.readers_for(type(modules[attention])) if attention in modules else ()
        package = readers[0].key.split(":")[0].split(".")[0] if readers else None
        # A package that is no engine builds its norms as published, as far as anyone knows.
        return package if package in self.entry.known_engines else None

    def samples(self) -> list[Sample]:
        """One layer of each kind: by class, spec type, and spec but for its index. Kernel layers included."""
        seen: dict[Any, Sample] = {}
        for path, layer in self.built().named_modules():
            for reader in self.asked.readers_for(type(layer)):
                spec = self.read(layer, reader, path)
                seen.setdefault((reader.key, without_index(spec)), Sample(path, layer, reader, spec))
        if not seen:
            raise BrokenContractError(f"{self.model}: the registry knows no layer of the model that build() returns")
        return list(seen.values())

    def read(self, layer: Any, reader: LayerReader, path: str, parallel: Parallel | None = None) -> Any:
        """One read, as a user does it."""
        return self.asked.spec_for(layer, reader.facts.spec, parallel=parallel or self.parallel, path=path)

    def again(self, sample: Sample, parallel: Parallel | None = None) -> Any:
        """The sample's spec, read now."""
        return self.read(sample.layer, sample.reader, sample.path, parallel)

    # ---- verbs

    def validate_spec(self, declared: Any, read: Any, where: str) -> None:
        """The spec that was read is the declared one; every field that is not is listed."""
        wrong = list(differences(declared, read))
        if wrong:
            raise BrokenContractError(f"{where}: " + "; ".join(wrong))

    def validate_refuses(self, expected: type[E], call: Callable[[], Any], *says: str, where: str) -> E:
        """The call raises this error, and its text holds these words."""
        try:
            answer = call()
        except expected as error:
            silent = [word for word in says if word not in str(error)]
            if silent:
                raise BrokenContractError(
                    f"{where}: the error does not say {', '.join(map(repr, silent))}: {error}"
                ) from error
            return error
        except Exception as error:
            raise BrokenContractError(
                f"{where}: expected {expected.__name__}, got {type(error).__name__}: {error}"
            ) from error
        raise BrokenContractError(f"{where}: expected {expected.__name__}, got {answer}")

    def validate_under_tp(self, size: int, rank: int, found: list[tuple[str, Any]], engine: str | None) -> None:
        """These specs, read off one rank's layers, are the ones declared for that rank; so are the sizes of the linears around norms."""
        declared = self.declared(size, rank, engine)
        self.validate(
            len(declared) == len(found),
            f"TP {size}, rank {rank}: {len(declared)} layers are declared, {len(found)} were read",
        )
        for (name, expected), (path, spec) in zip(declared, found, strict=True):
            self.validate_spec(expected, spec, f"TP {size}, rank {rank}: {path} (declared as {name})")
            for linear, side, width, local_width in linears_of(spec):
                problem = misfit(linear, side, width, local_width, size)
                self.validate(problem is None, f"TP {size}, rank {rank}: {path}: {problem}")


def is_kernel(sample: Sample) -> bool:
    """Whether the sample is an inner kernel layer."""
    return isinstance(sample.spec, KernelSpec)
