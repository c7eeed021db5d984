"""Stores that fail on purpose, around a real one."""

from collections.abc import Callable
from pathlib import Path

from groundhop.training.hotload.store.objects import Objects


class Faulty:
    """An `Objects` that calls `before(method, key)` first, which may raise, and `read(key, data)` on what was read."""

    def __init__(
        self,
        objects: Objects,
        before: Callable[[str, str], None] = lambda method, key: None,
        read: Callable[[str, bytes], bytes] = lambda key, data: data,
        after: Callable[[str, str], None] = lambda method, key: None,
    ) -> None:
        self._objects, self._before, self._read, self._after = objects, before, read, after

    def put(self, key: str, data: bytes) -> None:
        self._before("put", key)
        self._objects.put(key, data)
        self._after("put", key)

    def put_file(self, key: str, path: Path) -> None:
        self._before("put", key)
        self._objects.put_file(key, path)
        self._after("put", key)

    def create(self, key: str, data: bytes) -> bool:
        self._before("create", key)
        created = self._objects.create(key, data)
        self._after("create", key)
        return created

    def get(self, key: str) -> bytes:
        self._before("get", key)
        return self._read(key, self._objects.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self._before("get", key)
        return self._read(key, self._objects.get_range(key, start, stop))

    def size(self, key: str) -> int:
        self._before("size", key)
        return self._objects.size(key)

    def list(self, prefix: str) -> list[str]:
        self._before("list", prefix)
        found = self._objects.list(prefix)
        self._after("list", prefix)
        return found

    def delete(self, key: str) -> None:
        self._before("delete", key)
        self._objects.delete(key)
        self._after("delete", key)
