"""How trajectories and groups are printed: by a renderer that a room above registers, since `types` knows the
data only. Until one is, they show as their name."""

from typing import Any, Protocol


class Renderer(Protocol):
    """Shows a Trajectory or a Group."""

    def line(self, noun: Any) -> str:
        """One line, for `repr`."""

    def text(self, noun: Any) -> str:
        """Several lines, for `print`."""

    def page(self, noun: Any) -> str:
        """HTML, for a notebook."""


class _Plain:
    """The renderer before another is registered."""

    def line(self, noun: Any) -> str:
        return f"<{type(noun).__name__} of {noun.task.id}>"

    text = line

    def page(self, noun: Any) -> str:
        return f"<code>{type(noun).__name__}</code>"


_registered: list[Renderer] = [_Plain()]


def register(renderer: Renderer) -> None:
    """Lets this renderer show trajectories and groups from now on."""
    _registered[:] = [renderer]


def renderer() -> Renderer:
    """The renderer that was registered last."""
    return _registered[0]
