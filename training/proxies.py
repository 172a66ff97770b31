"""Proxies of a workload and its stages: subclasses observe or change single methods."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from training.workload import Prepare, Train, Workload

T = TypeVar("T")


def _forwarding(base: Any) -> Callable[[type[T]], type[T]]:
    """Let a proxy take every member of `base` from `inner`, its own and those with defaults."""

    def decorate(proxy: type[T]) -> type[T]:
        names = {name for name in dir(base) if not name.startswith("_") and name != "REQUIRED"}
        for name in names | {name for name in base.REQUIRED if not name.startswith("_")}:
            setattr(proxy, name, _forwarded(name))
        return proxy

    return decorate


def _forwarded(name: str) -> property:
    return property(lambda proxy: getattr(proxy._inner, name))


class _Proxy:
    """Forwards every attribute not defined here to `inner`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@_forwarding(Workload)
class WorkloadProxy(_Proxy, Workload[Any]):
    """A workload that forwards to `inner`."""

    _inner: Workload[Any]


@_forwarding(Prepare)
class PrepareProxy(_Proxy, Prepare):
    """A Prepare stage that forwards to `inner`."""

    _inner: Prepare


@_forwarding(Train)
class TrainProxy(_Proxy, Train):
    """A Train stage that forwards to `inner`."""

    _inner: Train


class _Restaged(WorkloadProxy):
    def __init__(
        self, inner: Workload[Any], stages: Callable[[Any], Sequence[Prepare | Train]]
    ) -> None:
        super().__init__(inner)
        self._stages = stages

    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return self._stages(c)


def restaged(
    workload: Workload[Any], stages: Callable[[Any], Sequence[Prepare | Train]]
) -> Workload[Any]:
    """The workload with these stages, a function of the config as its own are."""
    return cast(Workload[Any], _Restaged(workload, stages))
