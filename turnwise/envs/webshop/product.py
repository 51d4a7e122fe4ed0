"""What a shop sells."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a catalogue. Prices are in dollars."""

    id: str
    """The label of its link in a list of results, in lower case."""
    title: str
    kind: str
    """What a customer would search for, such as `backpack`."""
    categories: tuple[str, ...]
    """Category, and the categories inside it."""
    price: float
    """Price without options."""
    attributes: tuple[str, ...]
    options: Mapping[str, Mapping[str, float]]
    """Option → value → what the value adds to the price. No two values of a product are equal."""
    description: str
    features: tuple[str, ...]

    def price_with(self, values: Iterable[str]) -> float:
        """The price with these values of options."""
        added = [prices[value] for prices in self.options.values() for value in values if value in prices]
        return self.price + sum(added)

    def option_of(self, value: str) -> str | None:
        """The option that has this value."""
        return next((name for name, prices in self.options.items() if value in prices), None)

    @property
    def texts(self) -> tuple[str, ...]:
        """What the search reads: all texts, attributes and values of options."""
        values = [value for prices in self.options.values() for value in prices]
        return (self.id, self.title, self.kind, self.description, *self.features, *self.attributes, *values)


def dollars(price: float) -> str:
    """A price in dollars, without cents if they are 0.

    >>> dollars(34.0), dollars(9.5)
    ('34', '9.50')
    """
    if price == int(price):
        return str(int(price))
    return f"{price:.2f}"
