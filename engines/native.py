"""Whether what runs at a place of an engine is its own code: what its source files compile to, all the way down.

Other packages patch an engine's classes, functions and instances, often with `functools.wraps` and the same parameters. Where something of
ours would be called instead, theirs would not be: such a place is left alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, call, is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch.nn.modules.module as torch_module
from attrs import define, field
from torch import nn

from ..adapters.errors import FOREIGN, LayerfuseError
from .hooks import Hook
from .host import here
from .whose import codes, imported, is_source, kind_of, module_of, names_in, package, plain, within

OURS = __name__.partition(".")[0]
AROUND = frozenset({OURS, "torch", "triton", *sys.stdlib_module_names})
"""Packages whose wrappers are looked through, and whose functions are not looked at."""

OBJECTS: dict[str, Callable[[Look, Any, str], None]] = {}
"""Module of an engine's class whose objects are functions of a kind -> what looks at all that such an object runs."""

_code_of = attrgetter("__code__")
_CALLS = ("__call__", "_call_impl")
"""How torch comes to the forward of a module."""
_VALUES = bool | int | float | str
"""What settings are."""
_NOTHING = object()
"""What a setting says whose property raises an error."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class NotNativeError(LayerfuseError, RuntimeError):
    """What runs at a place is not the engine's own code; the message says whose it is."""

    def __init__(self, place: str, owner: str, file: str | None = None) -> None:
        self.place, self.owner, self.file = place, owner, file
        super().__init__(place, owner, file)

    def __str__(self) -> str:
        if self.file is not None:
            return f"{self.place} is not what {here().name}'s source says: its code is from {self.file}"
        return f"{self.place} is not {here().name}'s own: it is from {self.owner}"


class HookedError(NotNativeError):
    """A hook is registered on a module that would not be called."""

    def __str__(self) -> str:
        return f"{self.place}, from {self.owner}, would not be called"


class Held(NamedTuple):
    """What is held somewhere under a name."""

    where: Mapping[str, Any]
    name: str
    what: Any
    "None: nothing."
    place: str
    "What errors call it."
    owner: object
    "Whose the mapping is, for a class makes a new one whenever it is asked; a string is the name of a module."

    @property
    def key(self) -> tuple[int, str]:
        """The same for one name of one owner."""
        return id(self.owner), self.name

    @property
    def is_common(self) -> bool:
        """Whether it is a class's or a module's, and so of many places."""
        return isinstance(self.owner, type | str)


class Step:
    """Steps of all models in the process: what many places have in common is looked at once in each."""

    number: ClassVar[int] = 0

    @classmethod
    def begin(cls) -> None:
        """From now on it is another one. It is, too, when a place is come to again, or is new."""
        cls.number += 1


class Common:
    """What a place has in common with others like it. Alike ones are one object, so that it is looked at once in a step."""

    known: ClassVar[WeakValueDictionary[Hashable, Common]] = WeakValueDictionary()

    def __init__(self, held: Sequence[Held], functions: Sequence[FunctionType]) -> None:
        self._held, self._functions = held, functions
        self._gets, self._names = [each.where.get for each in held], [each.name for each in held]
        self._whats, self._codes = [each.what for each in held], [*map(_code_of, functions)]
        self._looked_at = -1
        "The step in which it was last as it was."

    @classmethod
    def of(cls, held: Sequence[Held], functions: Sequence[FunctionType]) -> Common:
        """The one of these."""
        key = (*((*each.key, id(each.what)) for each in held), *((id(each), id(each.__code__)) for each in functions))
        found = cls.known.get(key)
        if found is None:
            found = cls.known[key] = cls(held, functions)
        return found

    def is_same(self) -> bool:
        """Whether all of it is as it was."""
        if self._looked_at == Step.number:
            return True
        held = all(map(is_, map(call, self._gets, self._names), self._whats))
        if held and all(map(is_, map(_code_of, self._functions), self._codes)):
            self._looked_at = Step.number
            return True
        return False

    def accept(self) -> None:
        """From now on what stands for something is as good as that."""
        for at, held in enumerate(self._held):
            now = held.where.get(held.name)
            self._whats[at] = now if now is not held.what and _stands_for(now, held.what) else held.what
        self._codes = [*map(_code_of, self._functions)]


@define(kw_only=True, eq=False)
class Native:
    """All that runs at a place, as it was when every part of it was the engine's own."""

    held: tuple[Held, ...]
    empty: tuple[tuple[Mapping[Any, Any], str], ...]
    "Hooks of modules that would be called from elsewhere, and whose they are."
    classes: tuple[tuple[nn.Module, type], ...]
    "Modules, and what they are."
    functions: Mapping[FunctionType, tuple[CodeType, str]]
    "Functions of the engine's with their code, and what errors call them."
    answers: tuple[Held, ...]
    "By what classes would answer for values of their instances."
    asked: tuple[Callable[[], str | None], ...]
    "Ask instances whether they say those values, where one of `answers` is another."
    others: tuple[Callable[[], str | None], ...]
    "Ask what else would be another now, and say it."
    _common: tuple[Common, ...] = field(default=(), repr=False)
    _mine: tuple[Sequence[Any], ...] = field(init=False, repr=False)
    "What is not in common, as one look at it needs it."
    _called_in: int = field(init=False, default=-1, repr=False)
    "The step of the last call."

    def __attrs_post_init__(self) -> None:
        if not self._common:
            held = [each for each in (*self.held, *self.answers) if each.is_common]
            self._common = (Common.of(held, [*self.functions]),)
        self._keep()
        Step.begin()

    @classmethod
    def of_all(cls, several: Sequence[Native]) -> Native:
        """Several as one, which holds what they share once."""

        def each(name: str, key: Callable[[Any], Hashable] = id) -> tuple[Any, ...]:
            return tuple({key(part): part for native in several for part in attrgetter(name)(native)}.values())

        return cls(
            held=each("held", lambda held: (*held.key, id(held.what))),
            empty=each("empty", lambda hooks: id(hooks[0])),
            classes=each("classes", lambda pair: id(pair[0])),
            functions={function: found for native in several for function, found in native.functions.items()},
            answers=each("answers"),
            asked=each("asked"),
            others=each("others"),
            common=each("_common"),
        )

    @property
    def alike(self) -> frozenset[Hashable]:
        """What places share at which the same code runs with the same settings."""
        return frozenset((each.place, _told(each.what)) for each in self.held)

    def changed(self) -> str | None:
        """What has been put there since then, as a sentence; None where it is as it was. One or two microseconds."""
        if self._called_in == Step.number:
            Step.begin()
        self._called_in = Step.number
        if not self._is_same():
            problem = self._changed()
            if problem is not None:
                return problem
            self._keep()
            for common in self._common:
                common.accept()
        return next(filter(None, (ask() for ask in self.others)), None) if self.others else None

    def _is_same(self) -> bool:
        """Whether nothing at all is another. No line of Python runs for each of it."""
        for common in self._common:
            if not common.is_same():
                return False
        apart, absent, gets, names, whats, modules, classes, hooks = self._mine
        return (
            all(map(call, apart, absent))
            and all(map(is_, map(call, gets, names), whats))
            and all(map(is_, map(type, modules), classes))
            and not any(hooks)
        )

    def _keep(self) -> None:
        """Take what is there now for what is to stay there: it is that, or stands for it."""
        absent: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        there = []
        for each in self.held:
            if each.is_common:
                continue
            if each.what is None and each.name not in each.where:
                absent.setdefault(id(each.where), (each.where, set()))[1].add(each.name)
            else:
                there.append((each.where.get, each.name, each.where.get(each.name)))
        self._mine = (
            [where.keys().isdisjoint for where, _ in absent.values()],
            [names for _, names in absent.values()],
            *(zip(*there, strict=True) if there else ((), (), ())),
            [module for module, _ in self.classes],
            [cls for _, cls in self.classes],
            [hooks for hooks, _ in self.empty],
        )

    def _changed(self) -> str | None:
        for where, name, what, place, _ in self.held:
            now = where.get(name)
            if now is not what and not _stands_for(now, what):
                code = callable(now) or callable(what)
                return str(NotNativeError(place, module_of(now))) if code else f"{place} was {what}, and is {now}"
        for hooks, place in self.empty:
            if hooks:
                return str(HookedError(place, module_of(next(iter(hooks.values())))))
        for module, cls in self.classes:
            if type(module) is not cls:
                return str(NotNativeError(f"this {cls.__qualname__}", ":".join(kind_of(module))))
        for function, (own, place) in self.functions.items():
            if function.__code__ != own:
                return str(NotNativeError(place, module_of(function), function.__code__.co_filename))
        return next(filter(None, (ask() for ask in self.asked)), None)


def _stands_for(now: Any, what: Any) -> bool:
    """Whether something is a function of ours that passes a function of the engine's on. Those who wrap it copy its attributes."""
    return module_of(now).startswith(f"{OURS}.") and getattr(now, "__layerfuse_original__", None) is what


def _still_says(instance: Any, names: list[str]) -> Callable[[], str | None]:
    """Asks whether an instance says the values that it holds: its class may come to answer for them, by a property."""

    def said_by(read: Callable[[Any], Any]) -> Any:
        try:
            return read(instance)
        except FOREIGN:  # a property of somebody's
            return _NOTHING

    known = [(name, read, said_by(read)) for name, read in zip(names, map(attrgetter, names), strict=True)]

    def changed() -> str | None:
        for name, read, was in known:
            now = said_by(read)
            # What else it may give, a tensor say, need not compare as a value does.
            if now is not was and not (type(now) is type(was) and isinstance(was, _VALUES) and now == was):
                what = "raises an error" if now is _NOTHING else f"is {now}"
                return f"{name} of this {type(instance).__qualname__} was {was}, and {what}"
        return None

    return changed


def _answering(cls: type, name: str) -> list[Held]:
    """By what a class would answer for a name: the last of them, if any, is what it has."""
    found: list[Held] = []
    for base in cls.__mro__:
        found.append(Held(vars(base), name, vars(base).get(name), f"{base.__qualname__}.{name}", base))
        if name in vars(base):
            break
    return found


def _told(what: Any) -> Hashable:
    """A setting as it is, and the identity of code: children differ between layers, and what they are does not."""
    if isinstance(what, nn.Module):
        return id(type(what))
    if isinstance(what, bool | int | float | str | None):
        return what
    code = plain(what)
    # What is made of a method by a decorator, as torch.compile, is another function for each instance: by the same code, around the same method.
    return id(getattr(code, "__code__", code)), id(plain(inspect.unwrap(code) if callable(code) else code))


def native(module: nn.Module, *, bypassed: Container[str] = (), values: bool = True) -> Native:
    """All that runs where a forward of ours stands in a module of the engine's, whose hooks are called as ever.

    Args:
        module: the engine's.
        bypassed: the names of its children that are not called either, nor their hooks.
        values: whether the numbers that it reads off itself have to stay.

    Raises:
        NotNativeError: some of it is not the engine's own code.
    """
    look = Look(module, bypassed, values)
    look.forward(module)
    return look.native()


def native_call(module: nn.Module, *methods: tuple[Any, str]) -> Native:
    """The same of a module that is not called at all, and neither are the given methods of the given instances.

    Raises:
        NotNativeError: some of it is not the engine's own code, or it has hooks.
    """
    look = Look()
    look.module(module)
    return look.methods(*methods)


def native_methods(*methods: tuple[Any, str]) -> Native:
    """The same of methods of instances that are no modules.

    Raises:
        NotNativeError: some of it is not the engine's own code.
    """
    return Look().methods(*methods)


def held_methods(module: nn.Module, methods: Iterable[Hook]) -> Native:
    """Hold methods of a module's class to the source, and nothing that they call.

    Raises:
        NotNativeError: one is not the engine's own.
    """
    look = Look()
    for hook in methods:
        name = hook.path.rpartition(".")[2]
        base = next(each for each in type(module).__mro__ if name in vars(each))
        held, place = vars(base)[name], f"{base.__module__}:{base.__qualname__}.{name}"
        function = plain(held)
        if not isinstance(function, FunctionType) or not is_source(function.__code__, base.__module__):
            raise NotNativeError(place, module_of(held))
        look.hold(vars(base), name, held, place, base)
        look.hold(vars(module), name, None, f"{name} of this {type(module).__qualname__}", module)
    return look.native()


def native_function(module: str, name: str) -> Native:
    """The same of a function of one of the engine's modules, and all that it calls.

    Raises:
        NotNativeError: some of it is not the engine's own code.
    """
    look = Look()
    look.named(vars(sys.modules[module]), name, frozenset({name}))
    return look.native()


class Look:
    """One look at all that runs at a place."""

    def __init__(self, top: nn.Module | None = None, bypassed: Container[str] = (), values: bool = True) -> None:
        self.own, self.around = here().package, AROUND | here().kernels
        self.top, self.bypassed, self.values = top, bypassed, values
        self.held: dict[tuple[int, str], Held] = {}
        self.empty: list[tuple[Mapping[Any, Any], str]] = []
        self.classes: dict[int, tuple[nn.Module, type]] = {}
        self.functions: dict[FunctionType, str] = {}
        self.others: list[Callable[[], str | None]] = []
        self.values_of: dict[int, tuple[Any, list[str]]] = {}
        self.seen: set[Any] = set()

    def hold(self, where: Mapping[str, Any], name: str, what: Any, place: str, owner: object) -> None:
        """From now on something that is held elsewhere under a name has to stay what it is."""
        held = Held(where, name, what, place, owner)
        self.held[held.key] = held

    def native(self) -> Native:
        """What was found."""
        answers: dict[tuple[int, str], Held] = {}
        asked: list[Callable[[], str | None]] = []
        others = [*self.others]
        for instance, names in self.values_of.values():
            found = [_answering(type(instance), name) for name in ("__getattribute__", *names)]
            answers.update({each.key: each for answer in found for each in answer})
            ask = _still_says(instance, names)
            # What a class answers already may be another whenever it is asked.
            answered = any(inspect.isdatadescriptor(answer[-1].what) for answer in found)
            (others if answered else asked).append(ask)
        return Native(
            held=tuple(self.held.values()),
            empty=tuple(self.empty),
            classes=tuple(self.classes.values()),
            functions={function: (function.__code__, place) for function, place in self.functions.items()},
            answers=tuple(answers.values()),
            asked=tuple(asked),
            others=tuple(others),
        )

    def methods(self, *methods: tuple[Any, str]) -> Native:
        """What was found, with these methods of instances."""
        for instance, name in methods:
            self.attribute(type(instance), name, instance)
        return self.native()

    # ---- modules

    def module(self, module: nn.Module) -> None:
        """A module that is not called: neither its forward nor what is around that."""
        cls = type(module)
        for name in _CALLS:
            place = f"{cls.__qualname__}.{name}"
            for base in cls.__mro__:
                held = vars(base).get(name)
                self.hold(vars(base), name, held, place, base)
                if held is not None:
                    if module_of(held) != torch_module.__name__:
                        raise NotNativeError(place, module_of(held))
                    break
        every = [(vars(torch_module)[f"_global{name}"], "a hook of every module") for name in _HOOKS]
        for hooks, place in (*every, *((vars(module)[name], f"a hook of this {cls.__qualname__}") for name in _HOOKS)):
            if hooks:
                raise HookedError(place, module_of(next(iter(hooks.values()))))
            self.empty.append((hooks, place))
        self.forward(module)

    def forward(self, module: nn.Module) -> None:
        """What the forward of a module runs."""
        self.classes[id(module)] = (module, type(module))
        mine, place = vars(module), f"the forward of this {type(module).__qualname__}"
        if "forward" in mine:
            raise NotNativeError(place, module_of(mine["forward"]))
        if module is not self.top:  # there something of ours will stand
            self.hold(mine, "forward", None, place, module)
        self.attribute(type(module), "forward", module)

    def attribute(self, cls: type, name: str, instance: Any = None) -> None:
        """What a class has under a name, if that is code."""
        passed = []
        for base in cls.__mro__:
            if name not in vars(base):
                passed.append(base)
                continue
            held, place = vars(base)[name], f"{base.__module__}:{base.__qualname__}.{name}"
            function = plain(held)
            if isinstance(function, FunctionType):
                if package(base.__module__) in self.around and package(module_of(function)) in self.around:
                    return
                for each in passed:
                    self.hold(vars(each), name, None, place, each)
                self.hold(vars(base), name, held, place, base)
                ours = instance is self.top and name == "forward"
                if instance is not None and name not in vars(instance) and name[:2] != "__" and not ours:
                    self.hold(vars(instance), name, None, f"{name} of this {cls.__qualname__}", instance)
                self.function(function, place, cls, instance)
                if not any(_is_of(each, base) for each in _chain(function)):
                    raise NotNativeError(place, f"{module_of(function)}:{function.__code__.co_qualname}")
            elif f"{base.__qualname__}.{name}" in codes(base.__module__):
                raise NotNativeError(place, module_of(held))
            return

    # ---- functions

    def function(self, function: FunctionType, place: str, cls: type | None = None, instance: Any = None) -> None:
        """A function's code, and all that it names."""
        if (function, cls, id(instance)) in self.seen:
            return
        self.seen.add((function, cls, id(instance)))
        owner = module_of(function)
        if package(owner) not in (self.own, *self.around):
            raise NotNativeError(place, owner)
        native = package(owner) == self.own
        if native and not is_source(function.__code__, owner):
            raise NotNativeError(place, owner, function.__code__.co_filename)
        if native:
            self.functions[function] = place
        for each in within(function):
            self.function(each, place, cls, instance)
        if native:
            self._all_named(function, cls, instance)

    def _all_named(self, function: FunctionType, cls: type | None, instance: Any) -> None:
        names = names_in(function.__code__)
        for name in sorted(names):
            if cls is not None:
                self.attribute(cls, name, instance)
            if instance is not None:
                self._of_instance(instance, name)
            for each in (name, f"_{name}"):  # the function of torch.ops.vllm.name, say
                if each in function.__globals__:
                    self.named(function.__globals__, each, names)
            if package(name) == self.own and name in sys.modules:  # imported inside
                self._in_module(sys.modules[name], names)

    def _of_instance(self, instance: Any, name: str) -> None:
        mine = vars(instance)
        child = mine.get("_modules", {}).get(name)
        if child is not None and (instance is not self.top or name in self.bypassed):
            self.hold(mine["_modules"], name, child, f"{name} of this {type(instance).__qualname__}", mine["_modules"])
            self.module(child)
        if name not in mine:
            return
        held = mine[name]
        if isinstance(held, _VALUES | None) and name[0] != "_" and (instance is not self.top or self.values):
            self.hold(mine, name, held, f"{name} of this {type(instance).__qualname__}", instance)
            self.values_of.setdefault(id(instance), (instance, []))[1].append(name)
        if isinstance(held, FunctionType | MethodType | functools.partial):
            cls, function, place = type(instance), plain(held), f"{name} of this {type(instance).__qualname__}"
            own = isinstance(held, MethodType) and held.__self__ is instance
            if isinstance(held, MethodType) and own:  # what the engine has chosen
                place = f"{cls.__module__}:{cls.__qualname__}.{held.__name__}"
            self.hold(mine, name, held, place, instance)
            if isinstance(function, FunctionType):
                self.function(function, place, cls if own else None, instance if own else None)
        elif callable(held) and package(module_of(held)) not in (self.own, *self.around):
            raise NotNativeError(f"{name} of this {type(instance).__qualname__}", module_of(held))

    def named(self, where: Mapping[str, Any], name: str, names: frozenset[str]) -> None:
        """What a module has under a name."""
        held, module = where[name], str(where.get("__name__"))
        found, place = plain(held), f"{module}:{name}"
        modules = [each for each in imported(module).get(name, ()) if package(each) == self.own]
        owner = found.__name__ if isinstance(found, ModuleType) else module_of(found)
        # What another package puts where the engine imports a module of its own may be a module too, or any object with the same names.
        if modules and owner not in modules:
            raise NotNativeError(place, owner)
        if isinstance(found, ModuleType):
            if package(found.__name__) == self.own:
                self.hold(where, name, held, place, module)
            self._in_module(found, names)
        elif isinstance(found, FunctionType):
            self.hold(where, name, held, place, module)
            self.function(found, place)
        elif type(found).__module__ in OBJECTS:
            self.hold(where, name, held, place, module)
            OBJECTS[type(found).__module__](self, found, place)
        elif (
            not isinstance(found, type)
            and callable(found)
            and package(module_of(found)) not in (self.own, *self.around)
        ):
            raise NotNativeError(place, module_of(found))

    def _in_module(self, module: ModuleType, names: frozenset[str]) -> None:
        if package(module.__name__) != self.own or (module.__name__, names) in self.seen:
            return
        self.seen.add((module.__name__, names))
        for name in sorted(names):  # the reason is the same on every rank
            if name in vars(module):
                self.named(vars(module), name, names)


def _chain(function: FunctionType) -> Iterator[FunctionType]:
    yield function
    for each in within(function):
        yield from _chain(each)


def _is_of(function: FunctionType, cls: type) -> bool:
    """Whether a function is one that a class defines, under whichever name."""
    return (module_of(function), function.__code__.co_qualname.rpartition(".")[0]) == (cls.__module__, cls.__qualname__)
