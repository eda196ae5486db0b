"""The adapters that an engine has loaded, by name."""

from __future__ import annotations

from jaxinfer.engine.request.request import LoadedAdapter
from jaxinfer.validation import shown


class AdapterSlots:
    """Gives each adapter a name and a slot. Any thread may look adapters up; one at a time may change them."""

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._loaded: dict[str, LoadedAdapter] = {}  # replaced and never changed, as other threads read it

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        return tuple(self._loaded.values())

    def find(self, name: str) -> LoadedAdapter:
        """Returns the adapter of this name; ValueError if there is none."""
        loaded = self._loaded
        if (adapter := loaded.get(name)) is None:
            names = f"loaded are {', '.join(map(shown, loaded))}" if loaded else "none is loaded"
            raise ValueError(f"adapter={shown(name)} is not loaded, {names}; load it by load_adapter, or leave it out")
        return adapter

    def of_digest(self, digest: str) -> LoadedAdapter | None:
        """Returns an adapter of these contents, under any name, or None."""
        return next((adapter for adapter in self._loaded.values() if adapter.digest == digest), None)

    def choose(self, name: str, digest: str) -> LoadedAdapter:
        """Returns a new adapter in a free slot, for `put`; ValueError if the name is taken or no slot is free."""
        if name in self._loaded:
            raise ValueError(
                f"an adapter with the name {shown(name)} is loaded already; unload it first, or give another name"
            )
        taken = {adapter.slot for adapter in self._loaded.values()}
        slot = next((slot for slot in range(1, self._max_adapters + 1) if slot not in taken), None)
        if slot is None:
            raise ValueError(
                f"{len(taken)} adapters are loaded ({', '.join(map(shown, self._loaded))}), the most that"
                f" max_adapters={self._max_adapters} allows; unload one, or raise EngineConfig.max_adapters"
            )
        return LoadedAdapter(name, slot, digest)

    def put(self, adapter: LoadedAdapter) -> None:
        self._loaded = {**self._loaded, adapter.name: adapter}

    def remove(self, adapter: LoadedAdapter) -> None:
        self._loaded = {name: other for name, other in self._loaded.items() if other is not adapter}
